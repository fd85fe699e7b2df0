#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/torch.h>

#include <memory>
#include <type_traits>
#include <utility>

#include "fsdp/unit/bucket_reducer.h"
#include "fsdp/unit/unit.h"
#include "tessera/error.h"

namespace tessera::detail {
namespace {

// Runs when a parameter's gradient of one backward is in full.grad().
class Arrival : public torch::autograd::PostAccumulateGradHook {
 public:
  Arrival(std::weak_ptr<Unit> unit, GradReducer& reducer, std::size_t param)
      : unit_(std::move(unit)), reducer_(reducer), param_(param) {}
  void operator()(const torch::autograd::Variable&) override {
    const auto unit = unit_.lock();
    if (!unit || reducer_.arrived(param_)) return;
    throw Error(ErrorCode::unsupported,
                "a parameter of unit '" + unit->name() +
                    "' got a second gradient in one backward after the first was sent off (it is "
                    "used inside and outside of an activation checkpoint?)")
        .at_key(unit->param_name(param_));
  }

 private:
  std::weak_ptr<Unit> unit_;
  GradReducer& reducer_;  // the unit's own
  std::size_t param_;
};

using ExecInfo =
    std::remove_pointer_t<decltype(torch::autograd::get_current_graph_task_exec_info())>;

bool is_captured(const at::Tensor& parameter, ExecInfo& wanted) {
  if (!parameter.requires_grad()) return false;
  const auto found = wanted.find(torch::autograd::impl::grad_accumulator(parameter).get());
  return found != wanted.end() && found->second.captures_ != nullptr;
}

}  // namespace

void Unit::watch() {
  for (std::size_t i = 0; i < params_.size(); ++i) {
    params_[i].trains = params_[i].local.requires_grad();
    watch(i);
  }
}

void Unit::watch(std::size_t param) {
  const auto& full = params_[param].full;
  if (!full.requires_grad() || std::exchange(params_[param].watched, true)) return;
  full.register_hook([unit = weak_from_this()](const at::Tensor&) {
    if (const auto self = unit.lock()) self->require_collecting();
  });
  if (buckets_ == nullptr) return;
  torch::autograd::impl::set_post_acc_grad_hooks(
      full, std::make_unique<Arrival>(weak_from_this(), *reducer_, param));
}

void Unit::require_collecting() const {
  if (grad_state_ == GradState::collecting) return;
  if (has_graph_of_backward_) throw Error(ErrorCode::unsupported, graph_text_);
  throw Error(ErrorCode::invalid_argument,
              "a gradient reached unit '" + name_ + "' (" + type_ +
                  ") outside its backward: its forward was called past fully_shard, or the loss "
                  "uses a tensor that its forward did not return");
}

// torch::autograd::grad captures gradients on their way to grad(), where they would be averaged.
void Unit::require_accumulated() const {
  const auto* wanted = torch::autograd::get_current_graph_task_exec_info();
  if (wanted == nullptr || wanted->empty()) return;
  for (std::size_t i = 0; i < params_.size(); ++i) {
    if (!is_captured(params_[i].full, *wanted)) continue;
    throw Error(
        ErrorCode::unsupported,
        "torch::autograd::grad of a unit's parameter gives the gradient of this rank alone; "
        "call backward() and take the average from sharded_parameters(model)")
        .at_key(param_name(i));
  }
}

void Unit::allow_early_reduction(bool allowed) {
  if (buckets_ != nullptr) buckets_->allow_early(allowed);
}

void Unit::enter_backward(BackwardPlan plan) {
  if (grad_state_ == GradState::collecting) return;
  if (grad_state_ == GradState::reducing) finish_reduce();
  grad_state_ = next(grad_state_, GradStep::enter_backward);
  if (!reducer_) return;
  plan.id = number_;
  plan.pool = pool_;
  over_copies_ = plan.replicas;
  reducer_->begin(plan);
}

void Unit::require_may_set(const AverageRules& rules) const {
  if (!reducer_ || reducer_->may_set(rules)) return;
  throw Error(ErrorCode::invalid_argument,
              "a divide factor or hook is set while averages and gradients that NoSync keeps stand "
              "together in grad(): both would be reduced by it; set it before the step's first "
              "backward, or after zero_grad")
      .at_key(name_);
}

void Unit::set_rules(AverageRules rules) {
  if (reducer_) reducer_->set_rules(std::move(rules));
}

void Unit::set_comm_hook(CommHook hook) {
  if (std::exchange(has_comm_hook_, true))
    throw Error(ErrorCode::invalid_argument, "A communication hook is already registered")
        .at_key(name_);
  if (reducer_) reducer_->set_comm_hook(std::move(hook));
}

void Unit::start_reduce() {
  note(TraceStep::start_reduce);
  grad_state_ = next(grad_state_, GradStep::start_reduce);
  if (reducer_ && reducer_->start()) ++reductions;
  has_kept_ = false;
  has_waiting_ = is_hybrid_ && !over_copies_;
}

void Unit::advance_reduce() {
  if (reducer_ && grad_state_ == GradState::reducing) reducer_->advance();
}

void Unit::finish_reduce() {
  grad_state_ = next(grad_state_, GradStep::finish_reduce);
  if (!reducer_) return;
  note(TraceStep::wait_reduce);
  try {
    reducer_->finish();
  } catch (Error& error) {
    throw error.at_key(name_);
  }
  note(TraceStep::finish_reduce);
}

void Unit::look_at_reductions(GradReducer::Look how) {
  if (!reducer_) return;
  try {
    reducer_->look(how);
  } catch (Error& error) {
    throw error.at_key(name_);
  }
}

void Unit::keep_gradients() {
  grad_state_ = next(grad_state_, GradStep::keep);
  if (reducer_) reducer_->keep();
  has_kept_ = reducer_ != nullptr;
}

void Unit::forget_gradients() {
  if (reducer_) reducer_->forget();
  has_kept_ = has_waiting_ = false;
  grad_state_ = next(grad_state_, GradStep::forget);
  for (auto& param : params_) {
    param.full.mutable_grad() = at::Tensor();
    param.local.mutable_grad() = at::Tensor();
    param.stand_in = at::Tensor();
    param.shown_version.reset();
    param.mirrored = false;
  }
}

void Unit::show_gradients() {
  if (!store_) return;
  for (std::size_t i = 0; i < params_.size(); ++i) {
    show_kept(i);
    auto& param = params_[i];
    if (!param.local.grad().defined() || param.full.grad().defined()) continue;
    param.full.mutable_grad() = param.dead_grad;
    param.mirrored = true;
  }
}

void Unit::hide_gradients() {
  drop_taken_away();
  for (auto& param : params_) {
    if (const auto stand_in = std::exchange(param.stand_in, {});
        stand_in.defined() && param.local.grad().defined() &&
        param.local.grad().is_alias_of(stand_in))
      param.local.mutable_grad() = at::Tensor();
    if (!std::exchange(param.mirrored, false)) continue;
    if (!param.full.grad().defined()) param.local.mutable_grad() = at::Tensor();
    param.full.mutable_grad() = at::Tensor();
  }
}

// In PyTorch's FSDP1 what no_sync keeps is in the gradients that the optimizer and the module see,
// and zero_grad takes it away; FSDP2 has it where neither looks. Zeros that somebody writes are
// positive, and products of negative ones are not.
void Unit::show_kept(std::size_t index) {
  auto& param = params_[index];
  if (!is_fsdp1() || !reducer_->keeps(index)) return;
  auto& gradient = param.local.mutable_grad();
  if (!gradient.defined()) gradient = param.stand_in = at::full_like(param.local.detach(), -0.0);
  param.shown_version = static_cast<std::uint32_t>(gradient._version());
}

Unit::Shown Unit::shown(std::size_t index) const {
  const auto& param = params_[index];
  const auto& gradient = param.local.grad();
  if (!gradient.defined() || !param.full.grad().defined()) return Shown::taken_away;
  if (static_cast<std::uint32_t>(gradient._version()) == *param.shown_version) return Shown::kept;
  // Also where this rank holds nothing and cannot tell: those that do throw.
  const bool is_zeroed = !gradient.any().item<bool>() && !gradient.signbit().any().item<bool>();
  return is_zeroed ? Shown::taken_away : Shown::changed;
}

void Unit::require_kept_untouched() const {
  for (std::size_t i = 0; i < params_.size(); ++i) {
    if (!params_[i].shown_version || shown(i) != Shown::changed) continue;
    throw Error(ErrorCode::unsupported,
                "a gradient was changed between a backward without sync and one with it, while "
                "what NoSync keeps is not in it: change it after the latter")
        .at_key(param_name(i));
  }
}

void Unit::drop_taken_away() {
  for (std::size_t i = 0; i < params_.size(); ++i) {
    if (!params_[i].shown_version) continue;
    if (shown(i) == Shown::taken_away) reducer_->drop_kept(i);
    params_[i].shown_version.reset();
  }
}

}  // namespace tessera::detail
