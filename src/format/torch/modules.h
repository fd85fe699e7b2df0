// Modules that torch.save pickled whole, as the state dicts that they would have
// (docs/formats/torch-save.md).
#pragma once

#include <string>
#include <vector>

#include "tessera/value.h"

namespace tessera::torch_file {

// A tensor as state_dict() gives it, without gradients and attributes; any other value as it is.
[[nodiscard]] Value detached(const Value& value);

// Replaces every module in `tree`, below dicts, lists and tuples, by what its state_dict() gives
// where its class has torch.nn.Module's: an OrderedDict of tensors. Nodes of `tree` are changed in
// place; it may be replaced itself. Returns what was done, a line for each module, which names it
// by its place; also for those that are left because their names are not known. Throws `limit` for
// modules that are in so many places that their names would take over 128 MiB.
[[nodiscard]] std::vector<std::string> replace_modules(Value& tree);

}  // namespace tessera::torch_file
