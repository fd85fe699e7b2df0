// Names of the classes in a `.metadata` pickle, and their numbers (spec F-03).
#pragma once

#include <cstdint>

namespace tessera::dcp {

inline constexpr const char* kMetadataModule = "torch.distributed.checkpoint.metadata";
inline constexpr const char* kFilesystemModule = "torch.distributed.checkpoint.filesystem";
// olmo_core has a _StorageInfo of its own, without transforms.
inline constexpr const char* kOlmoFilesystemModule = "olmo_core.distributed.checkpoint.filesystem";
// Where older torch has TensorProperties and MEM_FORMAT_ENCODING.
inline constexpr const char* kOldPropertiesModule =
    "torch.distributed._shard.sharded_tensor.metadata";

// The largest argument of MEM_FORMAT_ENCODING: contiguous, channels last, preserve.
inline constexpr std::int64_t kLastMemoryFormat = 2;

}  // namespace tessera::dcp
