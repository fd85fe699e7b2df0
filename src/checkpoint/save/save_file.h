// Saving the tree of one process as one file.
#pragma once

#include <memory>

#include "tessera/checkpoint.h"

namespace tessera {

// What the options or the location's name say. Throws `unsupported` for a kind that is not saved.
[[nodiscard]] CheckpointKind kind_to_save(const Location& where, const SaveOptions& options);

// The store whose root the location is. Throws `invalid_argument` for one that names an object.
[[nodiscard]] std::shared_ptr<Store> root_of(const Location& where);

// `kind` is torch_file or safetensors. Throws as `save` does, and `unsupported` for more ranks than
// one.
IoReport save_file(const Value& tree, const Location& where, CheckpointKind kind,
                   const SaveOptions& options, int ranks);

}  // namespace tessera
