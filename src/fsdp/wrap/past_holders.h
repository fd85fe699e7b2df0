// libtorch's modules that call those inside of them by themselves, past every holder: what is below
// one of them cannot be a unit, since its calls cannot be seen.
#pragma once

#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <string>

namespace tessera::detail {

// Transformer with its encoder, decoder and layers, MultiheadAttention, AdaptiveLogSoftmaxWithLoss.
[[nodiscard]] bool calls_past_holders(const torch::nn::Module& module);

// Throws `invalid_argument` naming a module below `top` for which `is_unit` is true and that one of
// libtorch's modules, `top` or below it, calls by itself. `prefix`: of names.
void refuse_below_callers(const torch::nn::Module& top, const std::string& prefix,
                          const std::function<bool(const torch::nn::Module& module)>& is_unit);
// The same of what is a unit already.
void require_callable_units(const torch::nn::Module& top);

}  // namespace tessera::detail
