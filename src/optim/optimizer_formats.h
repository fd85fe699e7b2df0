// Which formats of torch::optim's optimizers are known.
#pragma once

#include <typeindex>

#include "tessera/optimizer_ref.h"

namespace tessera::detail {

// Null: not registered. What it gives stays where it is.
[[nodiscard]] const OptimizerFormat* find_format(std::type_index type);

// Throws `invalid_argument` naming a field that `state` serializes and the format does not list.
void require_complete(const OptimizerFormat& format, torch::optim::OptimizerParamState& state);

}  // namespace tessera::detail
