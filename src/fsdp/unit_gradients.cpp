#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "fsdp/quiet_copy.h"
#include "fsdp/unit.h"
#include "tessera/error.h"

namespace tessera::detail {
namespace {

// Behind the gradients a slice carries one element a parameter, 1 where this rank has a gradient,
// and the unit's number: the sums tell whether anybody had one, and that all ranks reduced the same
// unit.
constexpr std::int64_t kTrailer = 1;
// Numbers stay small enough for their sums to be exact.
constexpr int kIdRange = 1024;

}  // namespace

void Unit::watch() {
  for (auto& param : params_) {
    if (!param.full.requires_grad()) continue;
    param.full.register_hook([unit = weak_from_this()](const at::Tensor&) {
      const auto self = unit.lock();
      if (self && self->grad_state_ != GradState::collecting) {
        throw Error(
            ErrorCode::invalid_argument,
            "a gradient reached unit '" + self->name_ + "' (" + self->type_ +
                ") outside its backward: its forward was called past fully_shard, or the loss "
                "uses a tensor that its forward did not return");
      }
    });
  }
}

void Unit::enter_backward() {
  if (grad_state_ == GradState::collecting) return;
  if (grad_state_ == GradState::reducing) finish_reduce();
  grad_state_ = next(grad_state_, GradStep::enter_backward);
}

at::Tensor Unit::gradient_of(const UnitParam& param) const {
  const auto& gradient = param.full.grad();
  if (!gradient.defined()) return {};
  if (gradient.layout() != at::kStrided) {
    throw Error(ErrorCode::unsupported, "sparse gradients are not reduced").at_key(name_);
  }
  return gradient.to(channel_->shard().scalar_type()).contiguous().view({-1});
}

void Unit::start_reduce() {
  grad_state_ = next(grad_state_, GradStep::start_reduce);
  reducing_.clear();
  std::vector<at::Tensor> gradients;
  std::int64_t elements = 0;
  for (std::size_t i = 0; i < params_.size(); ++i) {
    if (!params_[i].full.requires_grad()) continue;
    reducing_.push_back(i);
    gradients.push_back(gradient_of(params_[i]));
    elements += params_[i].place.chunk_elements();
    params_[i].full.mutable_grad() = at::Tensor();
  }
  if (reducing_.empty()) return;
  elements += static_cast<std::int64_t>(reducing_.size()) + kTrailer;
  channel_->start_reduce(elements,
                         [&](int rank, at::Tensor& slice) { fill_slice(rank, gradients, slice); });
  ++reductions;
}

void Unit::fill_slice(int rank, const std::vector<at::Tensor>& gradients, at::Tensor& slice) const {
  std::int64_t offset = 0;
  for (std::size_t k = 0; k < reducing_.size(); ++k) {
    const auto& place = params_[reducing_[k]].place;
    const auto held = gradients[k].defined() ? place.row_count(rank) * place.row : 0;
    if (held > 0)
      copy_quietly(slice, offset, gradients[k], place.first_row(rank) * place.row, held);
    zero_quietly(slice, offset + held, place.chunk_elements() - held);
    offset += place.chunk_elements();
  }
  std::vector<double> trailer;
  for (const auto& gradient : gradients) trailer.push_back(gradient.defined() ? 1.0 : 0.0);
  trailer.push_back(id % kIdRange);
  const auto numbers = torch::tensor(trailer, slice.options());
  copy_quietly(slice, offset, numbers, 0, numbers.numel());
}

void Unit::check_same_unit(double sum_of_ids) const {
  const auto type = channel_->shard().scalar_type();
  if (type != at::kFloat && type != at::kDouble) return;  // sums of others are rounded
  if (std::lround(sum_of_ids) == static_cast<long>(world_) * (id % kIdRange)) return;
  throw Error(
      ErrorCode::mismatch,
      "the ranks reduced different units at the same time; their forwards must call the same "
      "modules in the same order")
      .at_key(name_);
}

void Unit::finish_reduce() {
  grad_state_ = next(grad_state_, GradStep::finish_reduce);
  if (reducing_.empty()) return;
  torch::NoGradGuard no_grad;
  auto sum = channel_->finish_reduce();
  const auto count = static_cast<std::int64_t>(reducing_.size());
  auto gradients = sum.narrow(0, 0, sum.numel() - count - kTrailer);
  const auto trailer =
      sum.narrow(0, gradients.numel(), count + kTrailer).to(at::kCPU, at::kDouble).contiguous();
  const auto* numbers = trailer.const_data_ptr<double>();
  check_same_unit(numbers[count]);
  if (world_ > 1) gradients.div_(world_);
  std::int64_t offset = 0;
  for (std::int64_t k = 0; k < count; ++k) {
    auto& param = params_[reducing_[k]];
    const auto at = std::exchange(offset, offset + param.place.chunk_elements());
    if (numbers[k] == 0) continue;  // no rank has one: as in torch, the gradient stays as it was
    // Detached: optimizers detach gradients in place, which views do not allow.
    auto mine = gradients.narrow(0, at, param.local.numel()).view(param.local.sizes()).detach();
    auto& gradient = param.local.mutable_grad();
    if (gradient.defined()) {
      gradient.add_(mine);
    } else {
      gradient = mine;
    }
  }
}

void Unit::keep_gradients() {
  grad_state_ = next(grad_state_, GradStep::keep);
}

void Unit::forget_gradients() {
  if (grad_state_ == GradState::reducing && !reducing_.empty()) {
    static_cast<void>(channel_->finish_reduce());
  }
  grad_state_ = GradState::idle;
  for (auto& param : params_) {
    param.full.mutable_grad() = at::Tensor();
    param.local.mutable_grad() = at::Tensor();
    param.mirrored = false;
  }
}

void Unit::show_gradients() {
  for (auto& param : params_) {
    if (!param.local.grad().defined() || param.full.grad().defined()) continue;
    param.full.mutable_grad() = param.dead_grad;
    param.mirrored = true;
  }
}

void Unit::hide_gradients() {
  for (auto& param : params_) {
    if (!std::exchange(param.mirrored, false)) continue;
    if (!param.full.grad().defined()) param.local.mutable_grad() = at::Tensor();
    param.full.mutable_grad() = at::Tensor();
  }
}

}  // namespace tessera::detail
