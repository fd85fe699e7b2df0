#include <torch/torch.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "optim/adamw_group.h"
#include "optim/fields.h"
#include "tessera/error.h"
#include "tessera/train_state.h"
#include "torch/tensor.h"

namespace tessera {
namespace {

Tensor state_leaf(const at::Tensor& held, const ShardedParameter& parameter) {
  if (!parameter.sharded) return leaf_of(held);
  if (parameter.flat) return flat_leaf_of(held, parameter.shape, parameter.offset);
  return sharded_leaf_of(held, parameter.shape, parameter.offset, parameter.dim);
}

// Names as in the module: a flat parameter stands for those in it.
std::vector<std::string> names_of(const std::vector<ShardedParameter>& parameters) {
  std::vector<std::string> names;
  for (const auto& parameter : parameters) {
    if (parameter.pieces.empty()) names.push_back(parameter.name());
    for (const auto& piece : parameter.pieces) names.push_back(piece.name);
  }
  return names;
}

// Who holds nothing of an original parameter of FSDP1 has no gradients of it and does not count
// its steps: other ranks say how many there were.
Tensor step_leaf(const AdamWState& of, const ShardedParameter& parameter) {
  auto leaf = leaf_of(of.step);
  const bool counts = !parameter.flat || !parameter.pieces.empty() || parameter.local.numel() > 0 ||
                      numel(parameter.shape) == 0;
  if (!counts) leaf.pieces.clear();
  return leaf;
}

void add_state(Value& state, const AdamWState& of, const ShardedParameter& parameter) {
  const auto entry = [&](Tensor exp_avg, Tensor exp_avg_sq) {
    return Value::dict({{"step", step_leaf(of, parameter)},
                        {"exp_avg", std::move(exp_avg)},
                        {"exp_avg_sq", std::move(exp_avg_sq)}});
  };
  if (parameter.pieces.empty()) {
    state.set_item(parameter.name(),
                   entry(state_leaf(of.exp_avg, parameter), state_leaf(of.exp_avg_sq, parameter)));
  }
  for (const auto& piece : parameter.pieces) {
    const auto part = [&](const at::Tensor& flat) {
      return flat_leaf_of(flat.narrow(0, piece.local_offset, piece.count), piece.shape,
                          piece.param_offset);
    };
    state.set_item(piece.name, entry(part(of.exp_avg), part(of.exp_avg_sq)));
  }
}

void require_same_parameters(const Value& names, const std::vector<ShardedParameter>& parameters,
                             std::size_t group) {
  std::vector<std::string> listed;
  for (const auto& name : names.items())
    listed.push_back(name.is(Value::Kind::string) ? name.as_string() : std::string());
  auto ours = names_of(parameters);
  // Their order is that of units: state is found by name.
  std::ranges::sort(listed);
  std::ranges::sort(ours);
  if (listed == ours) return;
  throw Error(ErrorCode::mismatch, "the group holds other parameters in the checkpoint (" +
                                       std::to_string(listed.size()) + ") than in the optimizer (" +
                                       std::to_string(ours.size()) + ")")
      .at_key("param_groups." + std::to_string(group) + ".params");
}

}  // namespace

Value detail::group_value(const AdamWOptions& options) {
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

AdamWOptions detail::group_options(const Value& group) {
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

Value optim_state(AdamW& optimizer) {
  optimizer.make_state();
  auto state = Value::dict();
  Value::List groups;
  for (std::size_t g = 0; g < optimizer.group_count(); ++g) {
    const auto& parameters = optimizer.parameters(g);
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      add_state(state, optimizer.state(g, i), parameters[i]);
    }
    auto group = detail::group_value(optimizer.options(g));
    Value::List names;
    for (auto& name : names_of(parameters)) names.emplace_back(std::move(name));
    group.set_item("params", Value::list(std::move(names)));
    groups.push_back(std::move(group));
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
    require_same_parameters(group.at("params"), optimizer.parameters(g), g);
    loaded.push_back(detail::group_options(group));
  }
  for (std::size_t g = 0; g < loaded.size(); ++g) optimizer.options(g) = loaded[g];
}

}  // namespace tessera
