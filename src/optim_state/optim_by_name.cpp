#include "optim_state/optim_by_name.h"

#include <algorithm>
#include <optional>
#include <ranges>
#include <set>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "optim/optimizer_state.h"
#include "optim_state/load_plan.h"
#include "optim_state/load_state.h"
#include "optim_state/model_by_name.h"
#include "optim_state/save_state.h"
#include "optim_state/state_message.h"
#include "optim_state/tree.h"
#include "tessera/error.h"
#include "tessera/pytorch/distributed_state_dict.h"
#include "value/render.h"

namespace tessera::detail {
namespace {

constexpr const char* kGetting = "getting optimizer states by name";
constexpr const char* kSetting = "setting optimizer states by name";

std::vector<at::Tensor> parameters_of(const OptimizerRef& optim) {
  std::vector<at::Tensor> all;
  for (auto& group : optim.access().parameters()) all.insert(all.end(), group.begin(), group.end());
  return all;
}

bool has_state(const OptimizerRef& optim) {
  return std::ranges::any_of(parameters_of(optim), [&](const at::Tensor& parameter) {
    return !optim.access().state(parameter).is(Value::Kind::none);
  });
}

// Its first step makes states, or an earlier one has.
bool makes_states(const OptimizerRef& optim) {
  return has_state(optim) ||
         std::ranges::any_of(parameters_of(optim), [&](const at::Tensor& parameter) {
           return parameter.requires_grad() &&
                  !optim.access().first_state(parameter).is(Value::Kind::none);
         });
}

// Whether each optimizer has a state on any rank: a rank may hold nothing of what is trained.
std::vector<bool> have_states(Group& group, const Optimizers& optims) {
  const auto of_ranks = all_trees(group, kGetting, [&] {
    Value::List mine;
    for (const auto& optim : optims) mine.emplace_back(has_state(optim));
    return Value::list(std::move(mine));
  });
  std::vector<bool> any(optims.size());
  for (const auto& flags : of_ranks) {
    if (flags.size() != optims.size())
      throw Error(ErrorCode::mismatch, "ranks have different numbers of optimizers");
    for (std::size_t i = 0; i < any.size(); ++i) any[i] = any[i] || flags.items()[i].as_bool();
  }
  return any;
}

// The optimizer's own form before its first step.
Value first_states(const OptimizerRef& optim) {
  auto tree = optimizer_state_dict(optim);
  std::vector<Value::Pair> states;
  for (const auto& group : optim.keys()) {
    for (const auto& [key, parameter] : group) {
      if (!parameter.requires_grad()) continue;
      auto state = optim.access().first_state(parameter);
      if (!state.is(Value::Kind::none)) states.emplace_back(key, std::move(state));
    }
  }
  tree.set_item("state", Value::dict(std::move(states)));
  return tree;
}

// The state that a caller gave, by the parameters of a model.
class GivenState {
 public:
  GivenState(const OptimModel& model, const Value& state);
  // This optimizer's part, in its groups.
  [[nodiscard]] Value part_for(const OptimizerRef& optim, bool strict) const;

 private:
  [[nodiscard]] Value options_for(const std::vector<std::string>& names) const;
  [[nodiscard]] const Value& group_without_parameters() const;
  void require_states(const OptimizerRef& optim, const std::vector<ParamGroup>& groups) const;

  const OptimModel& model_;
  const Value::List& groups_;
  NamedStates states_;
  bool has_states_;
  std::unordered_map<std::string, std::size_t> group_of_;  // by the parameter's first name
};

const Value& require_part(const Value& state, const char* key, Value::Kind kind) {
  const auto* part = state.find(key);
  if (part != nullptr && part->is(kind)) return *part;
  throw Error(ErrorCode::invalid_argument, "the state of an optimizer has no such part")
      .at_key(key);
}

const Value& require_names(const Value& states) {
  for (const auto& [key, value] : states.pairs()) {
    if (key.is(Value::Kind::string) && value.is(Value::Kind::dict)) continue;
    throw Error(ErrorCode::invalid_argument,
                "the states of parameters are to be dicts by the parameters' names")
        .at_key("state." + key_text(key));
  }
  return states;
}

GivenState::GivenState(const OptimModel& model, const Value& state)
    : model_(model),
      groups_(require_part(state, "param_groups", Value::Kind::list).items()),
      states_(model, require_names(require_part(state, "state", Value::Kind::dict))),
      has_states_(state.at("state").size() > 0) {
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    for (const auto& name : require_part(groups_[g], "params", Value::Kind::list).items()) {
      const auto first = model.first_name(name);
      if (first.empty()) continue;
      const auto place = group_of_.emplace(first, g).first;
      if (place->second == g) continue;
      throw Error(ErrorCode::mismatch, "two groups of the state have this parameter").at_key(first);
    }
  }
}

Value without_params(const Value& group) {
  std::vector<Value::Pair> options;
  std::ranges::copy_if(group.pairs(), std::back_inserter(options),
                       [](const auto& pair) { return !(pair.first == Value("params")); });
  return Value::dict(std::move(options));
}

const Value& GivenState::group_without_parameters() const {
  const Value* found = nullptr;
  int count = 0;
  for (const auto& group : groups_) {
    if (group.at("params").size() > 0) continue;
    found = &group;
    ++count;
  }
  if (count == 1) return *found;
  throw Error(ErrorCode::mismatch,
              "a group of the optimizer has no parameters, and the state has " +
                  std::to_string(count) + " such groups instead of one")
      .at_key("param_groups");
}

Value GivenState::options_for(const std::vector<std::string>& names) const {
  if (names.empty()) return without_params(group_without_parameters());
  std::set<std::size_t> found;
  for (const auto& name : names) {
    if (const auto group = group_of_.find(name); group != group_of_.end())
      found.insert(group->second);
  }
  if (found.empty()) {
    throw Error(ErrorCode::mismatch,
                "no group of the state has a parameter of this group: " + joined(names))
        .at_key("param_groups");
  }
  auto options = without_params(groups_[*found.begin()]);
  for (const auto g : found) {
    if (same_value(without_params(groups_[g]), options)) continue;
    throw Error(ErrorCode::mismatch,
                "the parameters of one group of the optimizer are in groups of the state with "
                "different options: " +
                    joined(names))
        .at_key("param_groups." + std::to_string(g));
  }
  return options;
}

void GivenState::require_states(const OptimizerRef& optim,
                                const std::vector<ParamGroup>& groups) const {
  std::vector<std::string> missing;
  for (const auto& group : groups) {
    for (const auto* param : group) {
      if (!param->tensor.requires_grad()) continue;
      std::ranges::copy_if(param->names, std::back_inserter(missing),
                           [&](const auto& name) { return states_.find(name) == nullptr; });
    }
  }
  if (missing.empty() || !makes_states(optim)) return;
  throw Error(ErrorCode::mismatch,
              "Missing optimizer state for parameters that require gradients: " + joined(missing) +
                  ". To load anyway, set strict = false")
      .at_key("state." + missing.front());
}

Value GivenState::part_for(const OptimizerRef& optim, bool strict) const {
  const auto groups = params_by_group(model_, optim);
  // A state without any was taken before the first step.
  if (strict && has_states_) require_states(optim, groups);
  std::vector<Value::Pair> states;
  Value::List parts;
  for (const auto& group : groups) {
    const auto names = names_of(group);
    auto part = options_for(names);
    part.set_item("params", Value::list(Value::List(names.begin(), names.end())));
    parts.push_back(std::move(part));
    for (const auto& name : names) {
      if (const auto* state = states_.find(name)) states.emplace_back(name, *state);
    }
  }
  return Value::dict(
      {{"state", Value::dict(std::move(states))}, {"param_groups", Value::list(std::move(parts))}});
}

// The part that each optimizer gets.
std::vector<Value> parts_of(const OptimModel& model, const Optimizers& optims, const Value& state,
                            bool strict) {
  if (!state.is(Value::Kind::dict) || state.size() == 0)
    throw Error(ErrorCode::invalid_argument, "the state of the optimizers is empty");
  std::optional<FlatKeys> flat;
  if (has_flat_keys(state)) flat.emplace(model, state);
  std::vector<Value> parts;
  for (const auto& optim : optims) {
    const auto given = flat ? flat->tree_for(optim) : state;
    parts.push_back(GivenState(model, given).part_for(optim, strict));
  }
  return parts;
}

LoadSource source_of(const DistributedStateDictOptions& options) {
  if (is_first_ranks(options)) return LoadSource::first_rank;
  return options.full_state_dict ? LoadSource::own : LoadSource::chunks;
}

void append(Value::List& to, const Value& list) {
  to.insert(to.end(), list.items().begin(), list.items().end());
}

void append_states(std::vector<Value::Pair>& to, std::unordered_set<std::string>& seen,
                   const Value& states) {
  for (const auto& [key, value] : states.pairs()) {
    if (!seen.insert(key_text(key)).second)
      throw Error(ErrorCode::conflict, "two optimizers have this parameter").at_key(key_text(key));
    to.emplace_back(key, value);
  }
}

}  // namespace

Value optimizers_by_name(const torch::nn::Module& module, const Optimizers& optims,
                         const DistributedStateDictOptions& options) {
  const OptimModel model(module);
  const GroupOf group(options.group, model);
  const auto have = have_states(group.get(), optims);
  const bool first_only = options.full_state_dict && options.cpu_offload;
  const bool wanted = !first_only || group.get().rank() == 0;
  std::vector<Value::Pair> states;
  std::unordered_set<std::string> seen;
  Value::List groups;
  for (std::size_t i = 0; i < optims.size(); ++i) {
    SaveRequest request{.in_chunks = !options.full_state_dict, .rank0_only = first_only};
    if (!have[i]) request.state = first_states(optims[i]);
    request.group = options.group;
    const auto one = save_state(module, optims[i], request);
    if (!wanted) continue;
    append_states(states, seen, one.at("state"));
    append(groups, one.at("param_groups"));
  }
  if (!wanted) return Value::dict();
  const auto state = Value::dict({{"state", Value::dict(std::move(states))},
                                  {"param_groups", Value::list(std::move(groups))}});
  return options.flatten_optimizer_state_dict ? with_flat_keys(state) : state;
}

OptimizersSetter::OptimizersSetter(const torch::nn::Module& module, const Optimizers& optims,
                                   const Value& state, const DistributedStateDictOptions& options)
    : optims_(optims) {
  const OptimModel model(module);
  const GroupOf group(options.group, model);
  const auto source = source_of(options);
  const bool counts = source != LoadSource::first_rank || group.get().rank() == 0;
  std::vector<Value> parts(optims.size());
  const auto load = [&] {
    for (std::size_t i = 0; i < optims.size(); ++i) {
      loaded_.push_back(load_state(module, counts ? &parts[i] : nullptr,
                                   {.source = source, .optim = optims[i], .group = options.group}));
    }
  };
  agree(group.get(), kSetting, [&] {
    for (const auto& optim : optims) (void)params_by_group(model, optim);
    if (counts) parts = parts_of(model, optims, state, options.strict);
    if (source == LoadSource::own) load();
  });
  if (source != LoadSource::own) load();
  agree(group.get(), kSetting, [&] {
    for (std::size_t i = 0; i < optims.size(); ++i)
      check_optimizer_state_dict(optims[i], loaded_[i]);
  });
}

void OptimizersSetter::apply() const {
  for (std::size_t i = 0; i < optims_.size(); ++i)
    load_optimizer_state_dict(optims_[i], loaded_[i], /*keep=*/true);
}

}  // namespace tessera::detail

namespace tessera {
namespace {

using Options = DistributedStateDictOptions;
using detail::ModelSetter;
using detail::OptimizersSetter;

void require_possible(const Options& options) {
  if (options.broadcast_from_rank0 && !options.full_state_dict) {
    throw Error(ErrorCode::invalid_argument,
                "full_state_dict must be true when broadcast_from_rank0 is true");
  }
}

void require_any(const OptimizerRefs& optimizers) {
  if (optimizers.all().empty()) throw Error(ErrorCode::invalid_argument, "no optimizer was given");
}

}  // namespace

Value get_model_state_dict(ModuleRef model, const Options& options) {
  require_possible(options);
  if (detail::state_entries(model.get()).empty())
    throw Error(ErrorCode::invalid_argument, "the model has neither parameters nor buffers");
  return detail::model_by_name(model, options);
}

Value get_optimizer_state_dict(ModuleRef model, const OptimizerRefs& optimizers,
                               const Options& options) {
  require_possible(options);
  require_any(optimizers);
  return detail::optimizers_by_name(model.get(), optimizers.all(), options);
}

std::pair<Value, Value> get_state_dict(ModuleRef model, const OptimizerRefs& optimizers,
                                       const Options& options) {
  auto of_model = get_model_state_dict(model, options);
  return {std::move(of_model), get_optimizer_state_dict(model, optimizers, options)};
}

IncompatibleKeys set_model_state_dict(ModuleRef model, const Value& state, const Options& options) {
  require_possible(options);
  return ModelSetter(model, state, /*may_be_empty=*/false, options).apply();
}

void set_optimizer_state_dict(ModuleRef model, const OptimizerRefs& optimizers, const Value& state,
                              const Options& options) {
  require_possible(options);
  require_any(optimizers);
  OptimizersSetter(model.get(), optimizers.all(), state, options).apply();
}

IncompatibleKeys set_state_dict(ModuleRef model, const OptimizerRefs& optimizers,
                                const Value& model_state, const Value& optim_state,
                                const Options& options) {
  require_possible(options);
  require_any(optimizers);
  ModelSetter of_model(model, model_state, /*may_be_empty=*/true, options);
  const OptimizersSetter of_optimizers(model.get(), optimizers.all(), optim_state, options);
  of_optimizers.apply();
  return of_model.apply();
}

}  // namespace tessera
