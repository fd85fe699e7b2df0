#include "optim/adamw_group.h"

#include <string>

#include "optim/fields.h"
#include "optim/optimizer_formats.h"
#include "tessera/error.h"

namespace tessera::detail {

Value group_value(const AdamWOptions& options) {
  auto of = torch::optim::AdamWOptions(options.lr)
                .betas({options.beta1, options.beta2})
                .eps(options.eps)
                .weight_decay(options.weight_decay);
  FieldsToDict fields;
  visit_adamw(fields, of);
  return fields.take();
}

AdamWGroup group_options(const Value& group) {
  require_options_of("AdamW", group);
  for (const auto* name : {"lr", "betas", "eps", "weight_decay"}) {
    if (group.find(name) == nullptr)
      throw Error(ErrorCode::mismatch, "the checkpoint's optimizer lacks this option of AdamW")
          .at_key(std::string("param_groups.") + name);
  }
  torch::optim::AdamWOptions of;
  DictToFields fields(group, {}, false);
  visit_adamw(fields, of);
  if (of.amsgrad()) {
    throw Error(ErrorCode::unsupported, "the state's optimizer uses an option that this one lacks")
        .at_key("amsgrad");
  }
  const auto [beta1, beta2] = of.betas();
  return {{.lr = of.lr(),
           .beta1 = beta1,
           .beta2 = beta2,
           .eps = of.eps(),
           .weight_decay = of.weight_decay()},
          fields.left_over()};
}

}  // namespace tessera::detail
