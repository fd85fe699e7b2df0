// What a user does to a unit's tensors between passes: replaces them, freezes and thaws them.
#include <torch/torch.h>

#include <algorithm>

#include "fsdp/unit/unit.h"
#include "tessera/error.h"
#include "torch/device.h"

namespace tessera::detail {

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

// A flat parameter is trained when one of those in it is.
void Unit::follow_requires_grad() {
  bool any = false;
  for (auto& param : params_) {
    // Said of what the optimizer works on: the module's tensor is the one that gets gradients.
    if (param.local.requires_grad() != param.trains)
      param.full.set_requires_grad(param.local.requires_grad());
    any = any || param.full.requires_grad();
  }
  for (std::size_t i = 0; i < params_.size(); ++i) {
    auto& param = params_[i];
    param.trains = geometry_ == Geometry::flat && is_sharded_ ? any : param.full.requires_grad();
    if (param.local.requires_grad() != param.trains) param.local.set_requires_grad(param.trains);
    watch(i);
  }
}

bool Unit::is_replaced() const {
  if (!store_ || param_state_ == ParamState::shown) return false;
  return std::ranges::any_of(params_, [&](const UnitParam& param) {
    return !store_->owns(param.full) || !param.local.is_alias_of(shard());
  });
}

void Unit::adopt_replaced() {
  if (!is_replaced()) return;
  const torch::NoGradGuard no_grad;
  for (std::size_t i = 0; i < params_.size(); ++i) {
    const auto& full = params_[i].full;
    const auto& local = params_[i].local;
    if (!local.is_alias_of(shard())) {
      const auto home =
          geometry_ == Geometry::flat ? store_->shard().view({-1}).detach() : store_->local(i);
      require_home(local, home, i);
      home.copy_(local.detach());
      replace_data(local, home);
    }
    if (store_->owns(full)) continue;
    const auto home = store_->full(i);
    require_home(full, home, i);
    whole().take_own(i, full.detach(), shard());
    full.set_data(home);
  }
}

void Unit::require_home(const at::Tensor& tensor, const at::Tensor& home, std::size_t index) const {
  const auto found = tensor.device().str(), expected = home.device().str();
  if (found != expected) {
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
  if (tensor.sizes() != home.sizes()) {
    throw Error(ErrorCode::invalid_argument,
                "Cannot writeback when the parameter shape changes: expects " +
                    to_string(home.sizes().vec()) + " but got " + to_string(tensor.sizes().vec()))
        .at_key(param_name(index));
  }
}

}  // namespace tessera::detail
