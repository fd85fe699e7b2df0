// Options of one group of an optimizer, as in Python optimizer.param_groups[group]["lr"].
//
//   set_lr(optimizer, 0, 0.5 * get_lr(optimizer, 0));
//   set_weight_decay(optimizer, 1, 0.0);
//
// They take whatever OptimizerRef takes: AdamW, optimizers of torch::optim, optimizers of your own.
// (AdamW::options gives the same by reference.) Local: ranks that train together set the same. Use
// them from the thread that steps the optimizer.
//
// A group that is not there is `invalid_argument`, and so is a number below 0 or that is none; then
// nothing was changed. `unsupported`: the optimizer has no such option (LBFGS no weight decay).
#pragma once

#include <cstddef>

#include "tessera/optimizer_ref.h"

namespace [[gnu::visibility("default")]] tessera {

[[nodiscard]] std::size_t group_count(const OptimizerRef& optimizer);

[[nodiscard]] double get_lr(const OptimizerRef& optimizer, std::size_t group);
void set_lr(const OptimizerRef& optimizer, std::size_t group, double lr);

[[nodiscard]] double get_weight_decay(const OptimizerRef& optimizer, std::size_t group);
void set_weight_decay(const OptimizerRef& optimizer, std::size_t group, double weight_decay);

}  // namespace tessera
