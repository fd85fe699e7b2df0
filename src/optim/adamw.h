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

// The arithmetic of AdamW on what this rank holds.

// One parameter and what belongs to it.
struct AdamWItem {
  at::Tensor parameter, gradient;
  const AdamWState* state = nullptr;  // its step counts this update already
};

// Updates the parameters and their states. On a device the host waits for nothing, and whatever
// lies flat takes one kernel for each dtype, besides the one that brings the numbers of steps and
// the one that casts gradients of another dtype.
void update_adamw(const std::vector<AdamWItem>& items, const AdamWOptions& options);

// A load fills the state where it is; what stands for it afterwards is a view of the same memory.
void copy_unless_same(at::Tensor& into, const at::Tensor& from);

}  // namespace tessera::detail
