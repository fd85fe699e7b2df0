// The options of tessera::AdamW as a group of torch.optim.AdamW.
#pragma once

#include "tessera/optim.h"
#include "tessera/value.h"

namespace tessera::detail {

// With PyTorch's keys in its order, without "params".
[[nodiscard]] Value group_value(const AdamWOptions& options);
// Throws `unsupported` for an option that AdamW here does not have, `not_found` for one that is
// missing.
[[nodiscard]] AdamWOptions group_options(const Value& group);

}  // namespace tessera::detail
