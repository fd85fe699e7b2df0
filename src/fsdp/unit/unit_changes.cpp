#include "fsdp/unit/unit_changes.h"

#include <algorithm>

#include <torch/torch.h>

#include "base/copies.h"
#include "base/digest.h"
#include "fsdp/unit/unit.h"
#include "tessera/error.h"
#include "torch/device.h"

namespace tessera::detail {
namespace {

std::uint64_t digest_of(const at::Tensor& shard) {
  const auto here = shard.detach().cpu();
  return digest64({static_cast<const std::byte*>(here.const_data_ptr()), here.nbytes()});
}

}  // namespace

std::uint32_t ShardChanges::version() const {
  return store_ ? static_cast<std::uint32_t>(store_->shard()._version()) : 0;
}

void ShardChanges::note_gather() {
  gathered_version_ = version();
  remembered_.reset();
  handed_out_ = false;
}

void ShardChanges::remember() {
  if (store_ && !remembered_) remembered_ = digest_of(store_->shard());
}

bool ShardChanges::has_changed() const {
  return is_stale() || (remembered_ && *remembered_ != digest_of(store_->shard()));
}

// Changes of a user to a unit's tensors between passes: replaces them, freezes and thaws them.

namespace {

// NaN is what it was, and a negative zero is another than a positive one.
at::Tensor differing_bits(const at::Tensor& a, const at::Tensor& b) {
  if (a.is_complex()) return differing_bits(at::view_as_real(a), at::view_as_real(b)).any(-1);
  const auto type = a.element_size() == 1   ? at::kByte
                    : a.element_size() == 2 ? at::kShort
                    : a.element_size() == 4 ? at::kInt
                                            : at::kLong;
  return a.view(type).ne(b.view(type));
}

}  // namespace

void Unit::refresh() {
  if (!schedule_->is_quiet()) return;
  follow_requires_grad();
  adopt_replaced();
}

std::string Unit::param_name(std::size_t index) const {
  const auto* wanted = params_[index].full.unsafeGetTensorImpl();
  const auto prefix = name_.empty() ? name_ : name_ + ".";
  for (const auto& module : modules()) {
    for (const auto& entry : module->named_parameters()) {
      if (entry.value().unsafeGetTensorImpl() == wanted) return prefix + entry.key();
    }
  }
  return prefix + std::to_string(index);
}

void Unit::follow_requires_grad() {
  for (auto& param : params_) {
    // Said of what the optimizer works on: the module's tensor is the one that gets gradients.
    if (param.local.requires_grad() != param.trains)
      param.full.set_requires_grad(param.local.requires_grad());
  }
  // A flat parameter is trained when one of those in it is.
  const bool any = std::ranges::any_of(
      params_, [](const UnitParam& param) { return param.full.requires_grad(); });
  for (std::size_t i = 0; i < params_.size(); ++i) {
    auto& param = params_[i];
    param.trains = is_flat() ? any : param.full.requires_grad();
    if (param.local.requires_grad() != param.trains) param.local.set_requires_grad(param.trains);
    watch(i);
  }
}

void Unit::note_trained() {
  for (auto& param : params_) param.in_graph = param.in_graph || param.full.requires_grad();
}

bool Unit::is_replaced() const {
  if (!store_ || param_state_ == ParamState::shown) return false;
  return std::ranges::any_of(params_, [&](const UnitParam& param) {
    return !store_->owns(param.full) || !param.local.is_alias_of(shard());
  });
}

void Unit::keep_shown() {
  if (!kept_.defined()) return;
  const torch::NoGradGuard no_grad;
  auto mine = kept_.clone();
  for (std::size_t i = 0; i < params_.size(); ++i) {
    const auto& full = params_[i].full;
    require_shape(full, store_->full(i), i);
    whole().take_own(i, full.detach(), mine);
  }
  const auto changed = differing_bits(mine, kept_);
  if (changed.any().item<bool>()) {
    await_copies();
    shard().copy_(at::where(changed, mine, shard()));
  }
  kept_ = std::move(mine);
}

void Unit::adopt_replaced() {
  keep_shown();
  if (!is_replaced()) return;
  const torch::NoGradGuard no_grad;
  for (std::size_t i = 0; i < params_.size(); ++i) {
    if (!params_[i].local.is_alias_of(shard())) adopt_local(i);
    if (!store_->owns(params_[i].full)) adopt_full(i);
  }
}

void Unit::adopt_local(std::size_t param) {
  const auto& local = params_[param].local;
  const auto home = is_flat() ? store_->shard().view({-1}).detach() : store_->local(param);
  require_home(local, home, param);
  await_copies();
  home.copy_(local.detach());
  replace_data(local, home);
}

void Unit::adopt_full(std::size_t param) {
  const auto& full = params_[param].full;
  const auto home = store_->full(param);
  require_home(full, home, param);
  await_copies();
  whole().take_own(param, full.detach(), shard());
  replace_data(full, home);
}

void Unit::require_home(const at::Tensor& tensor, const at::Tensor& home, std::size_t index) const {
  require_device(tensor, home, index);
  require_shape(tensor, home, index);
}

void Unit::require_shape(const at::Tensor& tensor, const at::Tensor& home,
                         std::size_t index) const {
  if (tensor.sizes() != home.sizes()) {
    throw Error(ErrorCode::invalid_argument,
                "Cannot writeback when the parameter shape changes: expects " +
                    to_string(home.sizes().vec()) + " but got " + to_string(tensor.sizes().vec()))
        .at_key(param_name(index));
  }
}

void Unit::require_device(const at::Tensor& tensor, const at::Tensor& home,
                          std::size_t index) const {
  const auto found = tensor.device().str(), expected = home.device().str();
  if (found == expected) return;
  throw Error(ErrorCode::invalid_argument,
              options_.offload_to_cpu && home.is_alias_of(shard())
                  ? "An FSDP-managed module with parameter CPU offloading enabled has parameters "
                    "on " +
                        found +
                        ". Make sure to not move the module from CPU when offloading parameters."
                  : "An FSDP-managed module unexpectedly has parameters on " + found +
                        ". Make sure to move the module to " + expected + " before training.")
      .at_key(param_name(index));
}

}  // namespace tessera::detail
