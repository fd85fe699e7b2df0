// Parameters that no unit has.
#pragma once

#include <torch/nn/module.h>

namespace tessera::detail {

// Says once in the log which trained parameters of a model with units are in no unit, and were not
// meant to be: the outermost module was forgotten.
void warn_of_forgotten(const torch::nn::Module& module);

}  // namespace tessera::detail
