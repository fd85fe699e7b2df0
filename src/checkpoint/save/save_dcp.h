// Saving a DCP checkpoint by N ranks.
#pragma once

#include <functional>
#include <memory>

#include "tessera/checkpoint.h"

namespace tessera {

// Flattens `tree`, with what that throws, and gives what saves it in the root of `store` when it is
// called, collectively: save() of tessera/checkpoint.h. `group` and `options` outlive that call.
[[nodiscard]] std::function<SaveResult()> dcp_save(const Value& tree, std::shared_ptr<Store> store,
                                                   Group& group, const SaveOptions& options);

}  // namespace tessera
