// One opener a kind; open_checkpoint picks.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "format/dcp/dcp.h"
#include "tessera/checkpoint.h"

namespace tessera {

inline constexpr std::string_view kDcpMetadata = ".metadata";
inline constexpr std::uint64_t kMetadataLimit = std::uint64_t{4}
                                                << 30;  // bytes of a `.metadata` we read

[[nodiscard]] Checkpoint open_dcp(std::shared_ptr<Store> store);
[[nodiscard]] Checkpoint open_torch(std::shared_ptr<Store> store, const ObjectInfo& file);
// One file, or all files of a directory: their tensors together.
[[nodiscard]] Checkpoint open_safetensors(std::shared_ptr<Store> store,
                                          const std::vector<ObjectInfo>& files);

[[nodiscard]] dcp::Metadata read_dcp_metadata(const Store& store);

// Proves P-14 for every tensor of an opened checkpoint.
void require_coverage(const Checkpoint& checkpoint);

}  // namespace tessera
