#include "optim/adamw_group.h"

#include <string>

#include "optim/fields.h"
#include "optim/optimizer_formats.h"
#include "tessera/error.h"

namespace tessera::detail {

namespace {

// In the order of torch.optim.AdamW, which has options that AdamW here does not.
void visit(StateFields& fields, AdamWOptions& options) {
  fields.number("lr", options.lr);
  fields.value(
      "betas",
      [&] {
        return Value::tuple({options.beta1, options.beta2});
      },
      [&](const Value& given) {
        const auto& betas = given.items();
        if (betas.size() != 2)
          throw Error(ErrorCode::corrupt, "betas are not a pair").at_key("param_groups");
        options.beta1 = number_of(betas[0]);
        options.beta2 = number_of(betas[1]);
      });
  fields.number("eps", options.eps);
  fields.number("weight_decay", options.weight_decay);
  fields.fixed("amsgrad", false, true);
  fields.fixed("maximize", false, true);
  fields.fixed("foreach", Value(), false);
  fields.fixed("capturable", false, false);
  fields.fixed("differentiable", false, false);
  fields.fixed("fused", Value(), false);
  // Adam's decay goes through the gradient and its moments.
  fields.fixed("decoupled_weight_decay", true, true);
}

}  // namespace

Value group_value(AdamWOptions options) {
  FieldsToDict fields;
  visit(fields, options);
  return fields.take();
}

AdamWGroup group_options(const Value& group) {
  require_options_of("AdamW", group);
  for (const auto* name : {"lr", "betas", "eps", "weight_decay"}) {
    if (group.find(name) == nullptr)
      throw Error(ErrorCode::mismatch, "the checkpoint's optimizer lacks this option of AdamW")
          .at_key(std::string("param_groups.") + name);
  }
  AdamWGroup made;
  DictToFields fields(group, {}, false);
  visit(fields, made.options);
  made.unknown = fields.left_over();
  return made;
}

}  // namespace tessera::detail
