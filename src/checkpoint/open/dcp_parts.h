// DCP checkpoints as trainers arrange them: several in one directory, and files of torch.save
// beside one (docs/formats/trainers.md).
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/dcp/catalog.h"
#include "tessera/checkpoint.h"

namespace tessera {

// The DCP checkpoint in a folder of `store`, whose files it names as `store` does.
[[nodiscard]] Checkpoint open_dcp_below(const std::shared_ptr<Store>& store,
                                        const std::string& folder, const OpenOptions& options);

// accelerate's folders `pytorch_model_fsdp_N` and `optimizer_N`, each a DCP checkpoint.

[[nodiscard]] bool is_part_folder(std::string_view name);
// Whether a name is that of the file by which a reader finds a part.
[[nodiscard]] bool is_part_metadata(std::string_view name);
[[nodiscard]] bool has_parts(const std::vector<ObjectInfo>& files);
// Both as one tree, as each names its leaves. Throws `incomplete` for a part without `.metadata`
// and where the model is missing, `unsupported` for several models, `conflict` for a name in both.
[[nodiscard]] Checkpoint open_parts(const std::shared_ptr<Store>& store,
                                    const OpenOptions& options);

// What Megatron-Core and Lightning put beside `.metadata`. Beside data files of our names they are
// nobody's: a save that took the place of another trainer's leaves such files where they are.

// Those of their files that are among listed ones with a `.metadata`.
[[nodiscard]] std::vector<std::string_view> names_beside(const std::vector<ObjectInfo>& files);
// Whether the checkpoint of a catalog may have such files in its store, of which it does not tell.
[[nodiscard]] bool has_beside(const Store& store, const Catalog& catalog);
// Puts what they hold into a DCP checkpoint that has been opened. Throws what reading them throws,
// and `conflict` for a name that the checkpoint has, too.
void add_beside(const OpenOptions& options, Checkpoint& checkpoint);

}  // namespace tessera
