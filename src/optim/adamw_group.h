// The options of tessera::AdamW as a group of torch.optim.AdamW.
#pragma once

#include <string>
#include <vector>

#include "tessera/optim.h"
#include "tessera/value.h"

namespace tessera::detail {

// With PyTorch's keys in its order, without "params".
[[nodiscard]] Value group_value(const AdamWOptions& options);

struct AdamWGroup {
  AdamWOptions options;
  std::vector<std::string> unknown;  // what the group has besides
};
// Throws `unsupported` for an option that would make AdamW here compute something else, `mismatch`
// for the group of another optimizer.
[[nodiscard]] AdamWGroup group_options(const Value& group);

}  // namespace tessera::detail
