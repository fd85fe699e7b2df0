// The formats of torch::optim's optimizers that are known.
#pragma once

#include <torch/optim/adamw.h>

#include <string>
#include <typeindex>

#include "tessera/optimizer_ref.h"

namespace tessera::detail {

// Null: not registered. What it gives stays where it is.
[[nodiscard]] const OptimizerFormat* find_format(std::type_index type);

// Lists the options of libtorch's AdamW under PyTorch's names, in its order.
void visit_adamw(StateFields& fields, torch::optim::AdamWOptions& options);

// Throws `mismatch` when `group` has the options of another one of torch's optimizers than `name`.
void require_options_of(const std::string& name, const Value& group);
// `optimizer` has no option of that name.
void warn_of_option(const std::string& optimizer, const std::string& option);

// Throws `invalid_argument` naming a field that `state` serializes and the format does not list.
void require_complete(const OptimizerFormat& format, torch::optim::OptimizerParamState& state);

}  // namespace tessera::detail
