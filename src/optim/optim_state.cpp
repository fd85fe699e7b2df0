#include <torch/torch.h>

#include <string>
#include <utility>

#include "tessera/error.h"
#include "tessera/train_state.h"
#include "torch/tensor.h"

namespace tessera {
namespace {

Tensor state_leaf(const at::Tensor& rows, const ShardedParameter& parameter) {
  return parameter.sharded ? sharded_leaf_of(rows, parameter.shape, parameter.offset)
                           : leaf_of(rows);
}

// A group as torch.optim.AdamW writes it, in its order.
Value group_value(const AdamWOptions& options, const std::vector<ShardedParameter>& parameters) {
  Value::List names;
  for (const auto& parameter : parameters) names.emplace_back(parameter.name());
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
      {"params", Value::list(std::move(names))},
  });
}

// Numbers come back as what was saved; a learning rate may be saved as a scalar tensor.
double number(const Value& value) {
  return value.is(Value::Kind::tensor) ? tensor_of(value.as_tensor()).item<double>()
                                       : value.as_real();
}

void require_off(const Value& group, const char* option) {
  const auto* value = group.find(option);
  if (value != nullptr && value->is(Value::Kind::boolean) && value->as_bool()) {
    throw Error(ErrorCode::unsupported,
                "the checkpoint's optimizer uses an option that AdamW lacks")
        .at_key(std::string("param_groups.") + option);
  }
}

void require_same_parameters(const Value& names, const std::vector<ShardedParameter>& parameters,
                             std::size_t group) {
  const auto& listed = names.items();
  bool same = listed.size() == parameters.size();
  for (std::size_t i = 0; same && i < listed.size(); ++i) {
    same = listed[i].is(Value::Kind::string) && listed[i].as_string() == parameters[i].name();
  }
  if (same) return;
  throw Error(ErrorCode::mismatch, "the group holds other parameters in the checkpoint (" +
                                       std::to_string(listed.size()) + ") than in the optimizer (" +
                                       std::to_string(parameters.size()) + ")")
      .at_key("param_groups." + std::to_string(group) + ".params");
}

}  // namespace

Value optim_state(AdamW& optimizer) {
  optimizer.make_state();
  auto state = Value::dict();
  Value::List groups;
  for (std::size_t g = 0; g < optimizer.group_count(); ++g) {
    const auto& parameters = optimizer.parameters(g);
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const auto& of = optimizer.state(g, i);
      state.set_item(parameters[i].name(),
                     Value::dict({{"step", leaf_of(of.step)},
                                  {"exp_avg", state_leaf(of.exp_avg, parameters[i])},
                                  {"exp_avg_sq", state_leaf(of.exp_avg_sq, parameters[i])}}));
    }
    groups.push_back(group_value(optimizer.options(g), parameters));
  }
  return Value::dict(
      {{"state", std::move(state)}, {"param_groups", Value::list(std::move(groups))}});
}

void set_optim_state(AdamW& optimizer, const Value& tree) {
  const auto& groups = tree.at("param_groups").items();
  if (groups.size() != optimizer.group_count()) {
    throw Error(ErrorCode::mismatch, "the checkpoint's optimizer has " +
                                         std::to_string(groups.size()) + " groups, this one " +
                                         std::to_string(optimizer.group_count()))
        .at_key("param_groups");
  }
  std::vector<AdamWOptions> loaded;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const auto& group = groups[g];
    require_off(group, "amsgrad");
    require_off(group, "maximize");
    require_same_parameters(group.at("params"), optimizer.parameters(g), g);
    const auto& betas = group.at("betas").items();
    if (betas.size() != 2)
      throw Error(ErrorCode::corrupt, "betas are not a pair").at_key("param_groups");
    loaded.push_back({.lr = number(group.at("lr")),
                      .beta1 = number(betas[0]),
                      .beta2 = number(betas[1]),
                      .eps = number(group.at("eps")),
                      .weight_decay = number(group.at("weight_decay"))});
  }
  for (std::size_t g = 0; g < loaded.size(); ++g) optimizer.options(g) = loaded[g];
}

}  // namespace tessera
