// Names of the classes in a `.metadata` pickle, and their numbers (checkpoint-rows F-03).
#pragma once

#include <cstdint>
#include <string_view>

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

// The class of the memory formats, by both of its names.
[[nodiscard]] bool is_memory_format_class(std::string_view module, std::string_view name);
// One of its members as a global: CLASS.NAME, or NAME of the module.
[[nodiscard]] bool is_memory_format_name(std::string_view module, std::string_view name);

}  // namespace tessera::dcp
