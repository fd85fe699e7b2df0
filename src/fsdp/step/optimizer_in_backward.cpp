#include "tessera/optimizer_in_backward.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/torch.h>

#include <optional>
#include <typeindex>
#include <unordered_map>
#include <utility>

#include "base/copies.h"
#include "tessera/error.h"

namespace tessera {
namespace {

// Gives `optimizer` another tensor to work on in the place of `old`. Returns the group that has it.
std::size_t replace_parameter(torch::optim::Optimizer& optimizer, const at::Tensor& old,
                              const at::Tensor& fresh) {
  std::optional<std::size_t> found;
  auto& groups = optimizer.param_groups();
  for (std::size_t g = 0; g < groups.size(); ++g) {
    for (auto& parameter : groups[g].params()) {
      if (!parameter.is_same(old)) continue;
      parameter = fresh;
      found = g;
    }
  }
  if (!found) {
    throw Error(ErrorCode::invalid_argument,
                "an optimizer in backward does not have the parameter that it was made for");
  }
  auto& states = optimizer.state();
  const auto known = states.find(old.unsafeGetTensorImpl());
  if (known == states.end()) return *found;
  auto state = std::move(known->second);
  states.erase(known);
  states[fresh.unsafeGetTensorImpl()] = std::move(state);
  return *found;
}

// Only such types can ever be trained.
at::Tensor of_same_memory(const at::Tensor& parameter) {
  const auto type = parameter.scalar_type();
  return parameter.detach().requires_grad_(at::isFloatingType(type) || at::isComplexType(type));
}

// Runs when a gradient is in the parameter's grad(). The parameter owns the hook and the hook the
// optimizer; so that they die together the optimizer works on another tensor over the parameter's
// memory.
class Step : public torch::autograd::PostAccumulateGradHook {
 public:
  Step(const at::Tensor& parameter, std::unique_ptr<torch::optim::Optimizer> optimizer)
      : optimizer_(std::move(optimizer)),
        same_(of_same_memory(parameter)),
        group_(replace_parameter(*optimizer_, parameter, same_)) {}
  void operator()(const torch::autograd::Variable& parameter) override {
    const torch::NoGradGuard no_grad;
    await_copies();
    same_.set_data(parameter.detach());
    same_.mutable_grad() = parameter.grad();
    optimizer_->step();
    optimizer_->zero_grad();
    parameter.mutable_grad() = at::Tensor();
  }

  [[nodiscard]] torch::optim::Optimizer& optimizer() const noexcept { return *optimizer_; }
  // The tensor that it works on.
  [[nodiscard]] const at::Tensor& tensor() const noexcept { return same_; }
  [[nodiscard]] std::size_t group() const noexcept { return group_; }  // that has it

 private:
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  at::Tensor same_;
  std::size_t group_;
};

// Null: none. A tensor that never required a gradient has no place for one, and libtorch's function
// fails on it.
const torch::autograd::PostAccumulateGradHook* hook_of(const at::Tensor& parameter) {
  if (torch::autograd::impl::get_autograd_meta(parameter) == nullptr) return nullptr;
  return torch::autograd::impl::post_acc_grad_hooks(parameter).get();
}

void require_possible(const ShardedParameter& parameter) {
  if (!parameter.members.empty()) {
    throw Error(ErrorCode::invalid_argument,
                "FSDP optimizer in backward only supported with use_orig_params=True!")
        .at_key(parameter.name());
  }
  // A unit that is whole on all ranks gives its parameters hooks of its own: frozen ones when they
  // are thawed.
  const bool is_whole_in_unit = !parameter.sharded && !parameter.home.expired();
  if (is_whole_in_unit || hook_of(parameter.local) != nullptr) {
    throw Error(ErrorCode::unsupported,
                "an optimizer in backward takes parameters that fully_shard or "
                "FullyShardedDataParallel shards, or that are in no unit, and that have no "
                "post-accumulate hook yet")
        .at_key(parameter.name());
  }
}

// Null: it has no optimizer in backward.
const Step* step_of(const at::Tensor& parameter) {
  return dynamic_cast<const Step*>(hook_of(parameter));
}

// Optimizers in backward as one.
class InBackward final : public OptimizerAccess {
 public:
  // A parameter, which keeps its optimizer.
  struct SteppedParameter {
    at::Tensor parameter, inside;  // the optimizer's own tensor
    OptimizerRef optimizer;
    std::size_t group;  // of the optimizer's

    [[nodiscard]] OptimizerAccess& access() const { return optimizer.access(); }
    [[nodiscard]] Value options() const { return access().group(group); }
  };

  explicit InBackward(const std::vector<ShardedParameter>& parameters) {
    for (const auto& parameter : parameters) {
      const auto* step = step_of(parameter.local);
      if (step == nullptr) continue;
      add({parameter.local, step->tensor(), step->optimizer(), step->group()},
          typeid(step->optimizer()));
    }
    if (groups_.empty()) {
      throw Error(ErrorCode::invalid_argument,
                  "none of these parameters has an optimizer in backward");
    }
  }

  std::vector<std::vector<at::Tensor>> parameters() const override {
    std::vector<std::vector<at::Tensor>> all;
    for (const auto& group : groups_) {
      auto& tensors = all.emplace_back();
      for (const auto& one : group) tensors.push_back(one.parameter);
    }
    return all;
  }
  Value group(std::size_t index) const override { return groups_.at(index).front().options(); }
  void check_group(std::size_t index, const Value& options) const override {
    const auto& one = groups_.at(index).front();
    one.access().check_group(one.group, options);
  }
  void set_group(std::size_t index, const Value& options) override {
    for (const auto& one : groups_.at(index)) one.access().set_group(one.group, options);
  }
  Value state(const at::Tensor& parameter) const override {
    const auto& one = of(parameter);
    return one.access().state(one.inside);
  }
  void check_state(const at::Tensor& parameter, const Value& state) const override {
    const auto& one = of(parameter);
    one.access().check_state(one.inside, state);
  }
  void set_state(const at::Tensor& parameter, const Value& state, bool keep) override {
    const auto& one = of(parameter);
    one.access().set_state(one.inside, state, keep);
  }
  Value first_state(const at::Tensor& parameter) const override {
    const auto& one = of(parameter);
    return one.access().first_state(one.inside);
  }

 private:
  void add(SteppedParameter one, std::type_index type) {
    auto options = one.options();
    std::size_t g = 0;
    while (g < groups_.size() && (types_[g] != type || !(groups_[g].front().options() == options)))
      ++g;
    if (g == groups_.size()) {
      groups_.emplace_back();
      types_.push_back(type);
    }
    places_.emplace(one.parameter.unsafeGetTensorImpl(), std::pair{g, groups_[g].size()});
    groups_[g].push_back(std::move(one));
  }
  [[nodiscard]] const SteppedParameter& of(const at::Tensor& parameter) const {
    const auto [group, index] = places_.at(parameter.unsafeGetTensorImpl());
    const auto& one = groups_[group][index];
    // Its memory, type and device are the parameter's, which may have changed since a step.
    const torch::NoGradGuard no_grad;
    at::Tensor(one.inside).set_data(one.parameter.detach());
    return one;
  }

  std::vector<std::vector<SteppedParameter>> groups_;
  std::vector<std::type_index> types_;  // of their optimizers
  std::unordered_map<const c10::TensorImpl*, std::pair<std::size_t, std::size_t>> places_;
};

}  // namespace

OptimizerRef optimizer_in_backward(const std::vector<ShardedParameter>& parameters) {
  return OptimizerRef(std::make_shared<InBackward>(parameters));
}

void apply_optimizer_in_backward(const std::vector<ShardedParameter>& parameters,
                                 const MakeOptimizer& make) {
  std::vector<std::pair<torch::Tensor, std::unique_ptr<Step>>> steps;
  for (const auto& parameter : parameters) {
    require_possible(parameter);
    steps.emplace_back(parameter.local,
                       std::make_unique<Step>(parameter.local, make({parameter.local})));
  }
  for (auto& [local, step] : steps)
    torch::autograd::impl::set_post_acc_grad_hooks(local, std::move(step));
}

}  // namespace tessera
