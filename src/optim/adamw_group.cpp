#include "optim/adamw_group.h"

#include <string>

#include "optim/fields.h"
#include "tessera/error.h"

namespace tessera::detail {

Value group_value(const AdamWOptions& options) {
  return Value::dict({
      {"lr", options.lr},
      {"betas", Value::tuple({options.beta1, options.beta2})},
      {"eps", options.eps},
      {"weight_decay", options.weight_decay},
      {"amsgrad", false},
      {"maximize", false},
      {"foreach", Value()},
      {"capturable", false},
      {"differentiable", false},
      {"fused", Value()},
      {"decoupled_weight_decay", true},
  });
}

AdamWOptions group_options(const Value& group) {
  for (const auto* option : {"amsgrad", "maximize"}) {
    const auto* value = group.find(option);
    if (value == nullptr || !value->is(Value::Kind::boolean) || !value->as_bool()) continue;
    throw Error(ErrorCode::unsupported,
                "the checkpoint's optimizer uses an option that AdamW lacks")
        .at_key(std::string("param_groups.") + option);
  }
  const auto& betas = group.at("betas").items();
  if (betas.size() != 2)
    throw Error(ErrorCode::corrupt, "betas are not a pair").at_key("param_groups");
  return {.lr = number_of(group.at("lr")),
          .beta1 = number_of(betas[0]),
          .beta2 = number_of(betas[1]),
          .eps = number_of(group.at("eps")),
          .weight_decay = number_of(group.at("weight_decay"))};
}

}  // namespace tessera::detail
