#include <ATen/MemoryOverlap.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "optim/adamw_update.h"
#include "tessera/error.h"
#include "tessera/optim.h"

namespace tessera {
namespace {

void require_updatable(const ShardedParameter& parameter, const AdamWState& state) {
  const auto& gradient = parameter.local.grad();
  if (!gradient.defined()) return;
  if (gradient.layout() != at::kStrided)
    throw Error(ErrorCode::unsupported, "AdamW does not take sparse gradients")
        .at_key(parameter.name());
  if (at::has_internal_overlap(parameter.local) == at::MemOverlap::Yes)
    throw Error(ErrorCode::invalid_argument,
                "elements of a parameter share memory (it was expanded): AdamW cannot update them")
        .at_key(parameter.name());
  for (const auto* other : {&gradient, &state.exp_avg, &state.exp_avg_sq}) {
    if (!other->defined() || other->sizes() == parameter.local.sizes()) continue;
    throw Error(ErrorCode::mismatch,
                "a gradient or state of AdamW has another shape than its parameter, which has " +
                    to_string(parameter.local.sizes().vec()))
        .at_key(parameter.name());
  }
}

// In the words of libtorch's AdamW. What is no number is out of range as well.
void require_in_range(const AdamWOptions& options) {
  const auto require = [](bool is_in_range, const char* what, double given) {
    if (is_in_range) return;
    throw Error(ErrorCode::invalid_argument,
                std::string("Invalid ") + what + ": " + std::to_string(given));
  };
  require(options.lr >= 0, "learning rate", options.lr);
  require(options.eps >= 0, "epsilon value", options.eps);
  require(options.beta1 >= 0 && options.beta1 < 1, "beta parameter at index 0", options.beta1);
  require(options.beta2 >= 0 && options.beta2 < 1, "beta parameter at index 1", options.beta2);
  require(options.weight_decay >= 0, "weight_decay value", options.weight_decay);
}

}  // namespace

struct AdamW::Impl {
  struct Group {
    std::vector<ShardedParameter> parameters;
    AdamWOptions options;
    std::vector<AdamWState> states;
  };
  std::vector<Group> groups;
  // One array for the states of all parameters of a shard, at the same places: what is one run of
  // parameters is one run of states. Parameters of the user's own may overlap, or lie in a storage
  // much larger than they are, so each has states of its own.
  struct Twin {
    // While somebody points there no other storage is made at its address.
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    at::Tensor exp_avg, exp_avg_sq;
  };
  std::unordered_map<const c10::StorageImpl*, Twin> twins;

  void require_new(const ShardedParameter& parameter) const;
  void add_group(ParameterGroup group);
  [[nodiscard]] const Twin& twin_of(const at::Tensor& local);
  void make_in_twin(const at::Tensor& local, AdamWState& state);
  void make_room(const ShardedParameter& parameter, AdamWState& state);
  void make_state(const ShardedParameter& parameter, AdamWState& state);
  static void require_updatable_all(const Group& group);
  std::vector<detail::AdamWItem> take_items(Group& group);
  void refresh() const;
};

// Values that were put in the place of parameters since the last pass are what is updated.
void AdamW::Impl::refresh() const {
  std::shared_ptr<detail::ParameterHome> last;
  for (const auto& group : groups) {
    for (const auto& parameter : group.parameters) {
      auto home = parameter.home.lock();
      if (!home || home == last) continue;
      home->refresh();
      last = std::move(home);
    }
  }
}

void AdamW::Impl::require_new(const ShardedParameter& parameter) const {
  for (const auto& group : groups) {
    for (const auto& known : group.parameters) {
      if (known.local.is_same(parameter.local)) {
        throw Error(ErrorCode::invalid_argument, "a parameter is in two groups of the optimizer")
            .at_key(parameter.name());
      }
    }
  }
}

void AdamW::Impl::add_group(ParameterGroup group) {
  Group added{{}, group.options, {}};
  for (auto& parameter : group.parameters) {
    require_new(parameter);
    added.parameters.push_back(std::move(parameter));
  }
  added.states.resize(added.parameters.size());
  groups.push_back(std::move(added));
}

const AdamW::Impl::Twin& AdamW::Impl::twin_of(const at::Tensor& local) {
  const auto& storage = local.storage();
  const auto* key = storage.unsafeGetStorageImpl();
  if (const auto known = twins.find(key); known != twins.end()) return known->second;
  std::erase_if(twins, [](const auto& entry) { return entry.second.storage.expired(); });
  const auto count = static_cast<std::int64_t>(storage.nbytes() / local.element_size());
  const auto options = local.options().requires_grad(false);
  Twin twin{storage.getWeakStorageImpl(), torch::zeros({count}, options),
            torch::zeros({count}, options)};
  return twins.emplace(key, std::move(twin)).first->second;
}

// Where the parameter lies in its shard, there in the twin.
void AdamW::Impl::make_in_twin(const at::Tensor& local, AdamWState& state) {
  const auto& twin = twin_of(local);
  const auto strides = local.strides();
  state.exp_avg = twin.exp_avg.as_strided(local.sizes(), strides, local.storage_offset());
  state.exp_avg_sq = twin.exp_avg_sq.as_strided(local.sizes(), strides, local.storage_offset());
}

// Room for a state; in a twin is still what was forgotten.
void AdamW::Impl::make_room(const ShardedParameter& parameter, AdamWState& state) {
  if (state.defined()) return;
  if (parameter.sharded) {
    make_in_twin(parameter.local, state);
  } else {
    state.exp_avg = at::empty_like(parameter.local);
    state.exp_avg_sq = at::empty_like(parameter.local);
  }
  state.step = torch::zeros({}, torch::kFloat32);
}

void AdamW::Impl::make_state(const ShardedParameter& parameter, AdamWState& state) {
  if (state.defined()) return;
  make_room(parameter, state);
  state.exp_avg.zero_();
  state.exp_avg_sq.zero_();
}

void AdamW::Impl::require_updatable_all(const Group& group) {
  for (std::size_t i = 0; i < group.parameters.size(); ++i)
    require_updatable(group.parameters[i], group.states[i]);
}

// What a step updates; its number of steps is counted already.
std::vector<detail::AdamWItem> AdamW::Impl::take_items(Group& group) {
  std::vector<detail::AdamWItem> items;
  for (std::size_t i = 0; i < group.parameters.size(); ++i) {
    const auto& local = group.parameters[i].local;
    if (!local.grad().defined()) continue;
    make_state(group.parameters[i], group.states[i]);
    *group.states[i].step.data_ptr<float>() += 1;
    // The kernel does not tell autograd; a graph that saved the parameter has to know.
    torch::autograd::impl::bump_version(local);
    if (local.numel() > 0) items.push_back({local, local.grad(), &group.states[i]});
  }
  return items;
}

AdamW::AdamW(std::vector<ShardedParameter> parameters, const AdamWOptions& options)
    : AdamW(std::vector<ParameterGroup>{{std::move(parameters), options}}) {}

AdamW::AdamW(std::vector<ParameterGroup> groups) : impl_(std::make_unique<Impl>()) {
  for (auto& group : groups) {
    require_in_range(group.options);
    std::unordered_set<const c10::TensorImpl*> seen;
    for (const auto& parameter : group.parameters) {
      if (!seen.insert(parameter.local.unsafeGetTensorImpl()).second) {
        throw Error(ErrorCode::invalid_argument, "a parameter is twice in a group of the optimizer")
            .at_key(parameter.name());
      }
    }
    impl_->add_group(std::move(group));
  }
}

AdamW::~AdamW() = default;
AdamW::AdamW(AdamW&&) noexcept = default;
AdamW& AdamW::operator=(AdamW&&) noexcept = default;

void AdamW::step() {
  torch::NoGradGuard no_grad;
  impl_->refresh();
  for (const auto& group : impl_->groups) {
    require_in_range(group.options);
    Impl::require_updatable_all(group);
  }
  for (auto& group : impl_->groups) detail::update_adamw(impl_->take_items(group), group.options);
}

void AdamW::zero_grad() {
  for (auto& group : impl_->groups) {
    for (auto& parameter : group.parameters) parameter.local.mutable_grad() = at::Tensor();
  }
}

std::size_t AdamW::group_count() const noexcept {
  return impl_->groups.size();
}
AdamWOptions& AdamW::options(std::size_t group) {
  return impl_->groups.at(group).options;
}
const AdamWOptions& AdamW::options(std::size_t group) const {
  return impl_->groups.at(group).options;
}
const std::vector<ShardedParameter>& AdamW::parameters(std::size_t group) const {
  return impl_->groups.at(group).parameters;
}
void AdamW::set_lr(double lr) {
  require_in_range({.lr = lr});
  for (auto& group : impl_->groups) group.options.lr = lr;
}
const AdamWState& AdamW::state(std::size_t group, std::size_t index) const {
  return impl_->groups.at(group).states.at(index);
}
void AdamW::set_state(std::size_t group, std::size_t index, const AdamWState& state) {
  const torch::NoGradGuard no_grad;
  const auto& parameter = impl_->groups.at(group).parameters.at(index);
  auto& own = impl_->groups[group].states[index];
  if (!state.defined()) {
    own = {};
    return;
  }
  for (const auto& tensor : {state.exp_avg, state.exp_avg_sq}) {
    if (tensor.defined() && tensor.sizes() == parameter.local.sizes()) continue;
    throw Error(ErrorCode::mismatch, "a state of AdamW has another shape than its parameter")
        .at_key(parameter.name());
  }
  // What is given may be views of the room, of a state that was forgotten.
  impl_->make_room(parameter, own);
  own.step.copy_(state.step);
  detail::copy_unless_same(own.exp_avg, state.exp_avg);
  detail::copy_unless_same(own.exp_avg_sq, state.exp_avg_sq);
}
void AdamW::make_state() {
  torch::NoGradGuard no_grad;
  for (auto& group : impl_->groups) {
    for (std::size_t i = 0; i < group.parameters.size(); ++i) {
      if (group.parameters[i].local.requires_grad())
        impl_->make_state(group.parameters[i], group.states[i]);
    }
  }
}

}  // namespace tessera
