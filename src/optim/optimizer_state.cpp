#include "optim/optimizer_state.h"

#include <string>
#include <unordered_map>
#include <utility>

#include <torch/torch.h>

#include "base/copies.h"
#include "base/log.h"
#include "tessera/error.h"
#include "tessera/optimizer_ref.h"

namespace tessera {

// load_optimizer_state_dict: an optimizer's own form of state into the optimizer.

namespace {

using detail::state_key;
using Keys = std::vector<std::vector<OptimizerRef::Key>>;
using Parameters = std::unordered_map<std::string, at::Tensor>;  // by the loaded tree's keys

void require_same_size(std::size_t ours, std::size_t given, const char* message,
                       const std::string& place) {
  if (ours == given) return;
  throw Error(ErrorCode::mismatch, std::string(message) + ": " + std::to_string(given) +
                                       " in the state, " + std::to_string(ours) +
                                       " in the optimizer")
      .at_key(place);
}

Parameters by_key(const std::vector<OptimizerRef::Key>& keys) {
  Parameters parameters;
  for (const auto& [key, parameter] : keys) parameters.emplace(state_key(key), parameter);
  return parameters;
}

// Matches by place, as PyTorch does; named ones by name.
Parameters match(const Keys& keys, const Value::List& groups, bool is_named) {
  require_same_size(keys.size(), groups.size(),
                    "loaded state dict has a different number of parameter groups", "param_groups");
  Parameters found;
  for (std::size_t g = 0; g < keys.size(); ++g) {
    const auto place = "param_groups." + std::to_string(g) + ".params";
    const auto& listed = groups[g].at("params").items();
    require_same_size(keys[g].size(), listed.size(),
                      "loaded state dict contains a parameter group that doesn't match the size "
                      "of optimizer's group",
                      place);
    const auto named = by_key(keys[g]);
    for (std::size_t i = 0; i < listed.size(); ++i) {
      const auto key = state_key(listed[i]);
      if (is_named && !named.contains(key)) {
        throw Error(ErrorCode::mismatch,
                    "the state's group lists a parameter that the "
                    "optimizer's group does not have: " +
                        key)
            .at_key(place);
      }
      const auto& parameter = is_named ? named.at(key) : keys[g][i].parameter;
      if (!found.emplace(key, parameter).second)
        throw Error(ErrorCode::mismatch, "the state's groups list a parameter twice: " + key)
            .at_key(place);
    }
  }
  return found;
}

using States = std::unordered_map<const c10::TensorImpl*, const Value*>;

// The states by parameter, checked.
States states_in(const Value& given, const Parameters& parameters, const OptimizerAccess& access) {
  States states;
  for (const auto& [key, value] : given.pairs()) {
    const auto found = parameters.find(state_key(key));
    if (found == parameters.end()) {
      log_of_all(LogLevel::warning,
                 "state of " + state_key(key) +
                     " belongs to no parameter of the optimizer: it is not loaded");
      continue;
    }
    try {
      access.check_state(found->second, value);
    } catch (Error& error) {
      error.while_doing("loading the state of parameter " + state_key(key));
      throw;
    }
    states.emplace(found->second.unsafeGetTensorImpl(), &value);
  }
  return states;
}

// What belongs where, after all has been checked.
struct LoadPlan {
  Keys keys;
  States states;
};

LoadPlan checked(const OptimizerRef& optimizer, const Value& state_dict) {
  auto& access = optimizer.access();
  LoadPlan plan{optimizer.keys(), {}};
  const auto& groups = state_dict.at("param_groups").items();
  const auto parameters = match(plan.keys, groups, optimizer.is_named());
  plan.states = states_in(state_dict.at("state"), parameters, access);
  for (std::size_t g = 0; g < groups.size(); ++g) access.check_group(g, groups[g]);
  return plan;
}

}  // namespace

void detail::check_optimizer_state_dict(const OptimizerRef& optimizer, const Value& state_dict) {
  (void)checked(optimizer, state_dict);
}

void load_optimizer_state_dict(const OptimizerRef& optimizer, const Value& state_dict, bool keep) {
  const auto [keys, states] = checked(optimizer, state_dict);
  auto& access = optimizer.access();
  const torch::NoGradGuard no_grad;
  await_copies();
  for (const auto& group : keys) {
    for (const auto& [key, parameter] : group) {
      const auto given = states.find(parameter.unsafeGetTensorImpl());
      access.set_state(parameter, given == states.end() ? Value() : *given->second, keep);
    }
  }
  const auto& groups = state_dict.at("param_groups").items();
  for (std::size_t g = 0; g < groups.size(); ++g) access.set_group(g, groups[g]);
}

// Several optimizers as one, whose groups follow one another.

namespace {

class SeveralAccess final : public OptimizerAccess {
 public:
  explicit SeveralAccess(const std::vector<OptimizerRef>& optimizers) : optimizers_(optimizers) {
    owners_ = owners();
  }

  std::vector<std::vector<at::Tensor>> parameters() const override {
    std::vector<std::vector<at::Tensor>> all;
    for (const auto& optimizer : optimizers_) {
      for (auto& group : optimizer.access().parameters()) all.push_back(std::move(group));
    }
    return all;
  }
  Value group(std::size_t index) const override {
    const auto [access, group] = at(index);
    return access->group(group);
  }
  void check_group(std::size_t index, const Value& options) const override {
    const auto [access, group] = at(index);
    access->check_group(group, options);
  }
  void set_group(std::size_t index, const Value& options) override {
    const auto [access, group] = at(index);
    access->set_group(group, options);
  }
  Value state(const at::Tensor& parameter) const override { return of(parameter).state(parameter); }
  void check_state(const at::Tensor& parameter, const Value& state) const override {
    of(parameter).check_state(parameter, state);
  }
  void set_state(const at::Tensor& parameter, const Value& state, bool keep) override {
    of(parameter).set_state(parameter, state, keep);
  }
  Value first_state(const at::Tensor& parameter) const override {
    return of(parameter).first_state(parameter);
  }
  std::optional<std::vector<at::Tensor>> awaited_state() const override {
    std::vector<at::Tensor> all;
    for (const auto& optimizer : optimizers_) {
      const auto some = optimizer.access().awaited_state();
      if (!some) return std::nullopt;
      all.insert(all.end(), some->begin(), some->end());
    }
    return all;
  }

 private:
  using Owners = std::unordered_map<const c10::TensorImpl*, OptimizerAccess*>;
  [[nodiscard]] Owners owners() const {
    Owners all;
    for (const auto& optimizer : optimizers_) {
      for (const auto& group : optimizer.access().parameters()) {
        for (const auto& parameter : group) add(parameter, optimizer.access(), all);
      }
    }
    return all;
  }
  static void add(const at::Tensor& parameter, OptimizerAccess& owner, Owners& all) {
    const auto [known, is_new] = all.emplace(parameter.unsafeGetTensorImpl(), &owner);
    if (is_new || known->second == &owner) return;
    throw Error(ErrorCode::invalid_argument,
                "two optimizers have a parameter in common, of shape " +
                    to_string(parameter.sizes().vec()));
  }
  // Groups and parameters may be added to an optimizer at any time.
  [[nodiscard]] OptimizerAccess& of(const at::Tensor& parameter) const {
    const auto* key = parameter.unsafeGetTensorImpl();
    if (!owners_.contains(key)) owners_ = owners();
    return *owners_.at(key);
  }
  // The optimizer that has a group, and which of its own that is.
  [[nodiscard]] std::pair<OptimizerAccess*, std::size_t> at(std::size_t index) const {
    auto left = index;
    for (const auto& optimizer : optimizers_) {
      const auto groups = optimizer.access().parameters().size();
      if (left < groups) return {&optimizer.access(), left};
      left -= groups;
    }
    throw Error(ErrorCode::invalid_argument, "no group " + std::to_string(index));
  }

  std::vector<OptimizerRef> optimizers_;
  mutable Owners owners_;
};

}  // namespace

OptimizerRef OptimizerRef::several(const std::vector<OptimizerRef>& optimizers) {
  OptimizerRef all(std::make_shared<SeveralAccess>(optimizers));
  Names names;
  for (const auto& optimizer : optimizers) {
    if (optimizer.is_named()) names.insert(optimizer.names_->begin(), optimizer.names_->end());
  }
  return names.empty() ? all : all.with_names(std::make_shared<const Names>(std::move(names)));
}

}  // namespace tessera
