// torch_checkpointing's directories: ITEM_R.pt of each item of a state and each rank, and what all
// of them are together in metadata.pkl (docs/formats/rank-files.md).
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "tessera/checkpoint.h"

namespace tessera {

inline constexpr std::string_view kItemsMetadata = "metadata.pkl";

// The names of such files, with that of the metadata; empty without it.
[[nodiscard]] std::vector<std::string_view> item_files(const std::vector<ObjectInfo>& files);
[[nodiscard]] bool has_item_files(const std::vector<ObjectInfo>& files);
// Throws `incomplete` for a rank's file or an item that is missing, `corrupt` where the metadata
// says otherwise than the tensors, `unsupported` for metadata of another program or version and for
// files of other names.
[[nodiscard]] Checkpoint open_item_files(const std::shared_ptr<Store>& store,
                                         const std::vector<ObjectInfo>& files);

}  // namespace tessera
