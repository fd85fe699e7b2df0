#include "optim/adamw.h"

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_fused_adamw.h>
#include <torch/csrc/autograd/utils/grad_layout_contract.h>
#include <torch/torch.h>

#include "base/copies.h"
#include "optim/fields.h"
#include "optim/optimizer_formats.h"
#include "tessera/error.h"
#include "tessera/optim.h"
#include "torch/tensor.h"

namespace tessera::detail {

Value group_value(const AdamWOptions& options) {
  auto of = torch::optim::AdamWOptions(options.lr)
                .betas({options.beta1, options.beta2})
                .eps(options.eps)
                .weight_decay(options.weight_decay);
  FieldsToDict fields;
  visit_adamw(fields, of);
  return fields.take();
}

AdamWGroup group_options(const Value& group) {
  require_options_of("AdamW", group);
  for (const auto* name : {"lr", "betas", "eps", "weight_decay"}) {
    if (group.find(name) == nullptr)
      throw Error(ErrorCode::mismatch, "the checkpoint's optimizer lacks this option of AdamW")
          .at_key(std::string("param_groups.") + name);
  }
  torch::optim::AdamWOptions of;
  DictToFields fields(group, {}, false);
  visit_adamw(fields, of);
  if (of.amsgrad()) {
    throw Error(ErrorCode::unsupported, "the state's optimizer uses an option that this one lacks")
        .at_key("amsgrad");
  }
  const auto [beta1, beta2] = of.betas();
  return {{.lr = of.lr(),
           .beta1 = beta1,
           .beta2 = beta2,
           .eps = of.eps(),
           .weight_decay = of.weight_decay()},
          fields.left_over()};
}

namespace {

using Items = std::vector<AdamWItem>;

// Gradients of another dtype than their parameters are cast before the kernel. Low precision was to
// save memory: on the CPU one run at a time has its gradients in the parameters' dtype. On a device
// each time costs launches, and its kernels take about as much as this at once anyway.
constexpr std::size_t kCastBytes = std::size_t{128} << 20;

// The arguments of the kernel: lists of tensors of equal shapes. A device's kernel takes tensors of
// one dtype.
struct Batch {
  at::Device device;
  at::ScalarType type, gradient_type;
  std::vector<at::Tensor> parameters = {}, gradients = {}, exp_avgs = {}, exp_avg_sqs = {},
                          steps = {};
  std::size_t bytes = 0;  // of its parameters

  explicit Batch(const AdamWItem& item)
      : device(item.parameter.device()),
        type(item.parameter.scalar_type()),
        gradient_type(item.gradient.scalar_type()) {}
  [[nodiscard]] bool takes(const AdamWItem& item) const {
    return item.parameter.device() == device && item.parameter.scalar_type() == type &&
           item.gradient.scalar_type() == gradient_type;
  }
};

// The kernel takes all four as flat memory: element i of one belongs to element i of the others
// only where they lie alike, without gaps, and are what their memory holds.
bool lies_flat(const AdamWItem& item) {
  const auto& parameter = item.parameter;
  if (!parameter.is_non_overlapping_and_dense() || !is_plain(parameter)) return false;
  for (const auto* other : {&item.gradient, &item.state->exp_avg, &item.state->exp_avg_sq}) {
    if (!torch::autograd::utils::obeys_layout_contract(*other, parameter) || !is_plain(*other))
      return false;
  }
  return item.state->exp_avg.scalar_type() == parameter.scalar_type();
}

bool follows(const at::Tensor& next, const at::Tensor& before) {
  return next.is_contiguous() && before.is_contiguous() && is_plain(next) &&
         next.is_alias_of(before) &&
         next.storage_offset() == before.storage_offset() + before.numel();
}

// Neighbours in all four arrays and equally old: one run of memory for the kernel.
bool joins(const AdamWItem& next, const AdamWItem& before) {
  return follows(next.parameter, before.parameter) && follows(next.gradient, before.gradient) &&
         follows(next.state->exp_avg, before.state->exp_avg) &&
         follows(next.state->exp_avg_sq, before.state->exp_avg_sq) &&
         next.state->step.item<float>() == before.state->step.item<float>();
}

at::Tensor flat(const at::Tensor& first, std::int64_t count) {
  return first.detach().as_strided({count}, {1}, first.storage_offset());
}

void append_run(const Items& items, std::size_t begin, std::size_t end, Batch& batch) {
  const auto& first = items[begin];
  std::int64_t count = 0;
  for (auto i = begin; i < end; ++i) count += items[i].parameter.numel();
  batch.parameters.push_back(flat(first.parameter, count));
  batch.gradients.push_back(flat(first.gradient, count));
  batch.exp_avgs.push_back(flat(first.state->exp_avg, count));
  batch.exp_avg_sqs.push_back(flat(first.state->exp_avg_sq, count));
  batch.steps.push_back(first.state->step);
  batch.bytes += batch.parameters.back().nbytes();
}

// The kernel knows no complex numbers. Each of them is two numbers with moments of their own, as in
// Python.
std::vector<at::Tensor> as_real(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> real;
  real.reserve(tensors.size());
  for (const auto& tensor : tensors)
    real.push_back(tensor.is_complex() ? at::view_as_real(tensor) : tensor);
  return real;
}

// Numbers of the host on `device`. One alone goes along with a kernel, several are copied from
// page-locked memory: the host does not wait.
std::vector<at::Tensor> numbers_on(at::Device device, const std::vector<float>& numbers) {
  const auto count = static_cast<std::int64_t>(numbers.size());
  const auto there = at::TensorOptions(at::kFloat).device(device);
  if (count == 1) return at::full({1}, numbers.front(), there).unbind();
  const auto here = at::empty({count}, at::TensorOptions(at::kFloat).pinned_memory(true));
  std::ranges::copy(numbers, here.mutable_data_ptr<float>());
  return at::empty({count}, there).copy_(here, /*non_blocking=*/true).unbind();
}

// The host counts steps. A device's kernel reads from memory there how many there were, and
// parameters that are equally old, as most are, share the number.
std::vector<at::Tensor> steps_on(at::Device device, const std::vector<at::Tensor>& steps) {
  if (device.is_cpu()) return steps;
  std::map<float, std::size_t> places;
  std::vector<float> ages;
  for (const auto& step : steps) {
    const auto age = *step.const_data_ptr<float>();
    if (places.emplace(age, ages.size()).second) ages.push_back(age);
  }
  const auto numbers = numbers_on(device, ages);
  std::vector<at::Tensor> there;
  there.reserve(steps.size());
  for (const auto& step : steps) there.push_back(numbers[places.at(*step.const_data_ptr<float>())]);
  return there;
}

std::vector<at::Tensor> cast(const std::vector<at::Tensor>& tensors, at::ScalarType type) {
  std::vector<at::Tensor> wanted;
  wanted.reserve(tensors.size());
  for (const auto& tensor : tensors)
    wanted.push_back(at::empty_like(tensor, tensor.options().dtype(type)));
  at::_foreach_copy_(wanted, tensors);
  return wanted;
}

void run_kernel(const Batch& batch, const AdamWOptions& o) {
  const auto& gradients =
      batch.gradient_type == batch.type ? batch.gradients : cast(batch.gradients, batch.type);
  at::_fused_adamw_(as_real(batch.parameters), as_real(gradients), as_real(batch.exp_avgs),
                    as_real(batch.exp_avg_sqs), {}, steps_on(batch.device, batch.steps), o.lr,
                    o.beta1, o.beta2, o.weight_decay, o.eps, /*amsgrad=*/false,
                    /*maximize=*/false);
}

// Whatever lies in another way is updated as flat copies.
void update_copies(const AdamWItem& item, const AdamWOptions& options) {
  const auto& parameter = item.parameter;
  const auto flat_copy = [&](const at::Tensor& tensor) {
    return plain(tensor.detach().to(parameter.scalar_type())).contiguous();
  };
  Batch batch(item);
  batch.gradient_type = batch.type;
  batch.parameters = {flat_copy(parameter)};
  batch.gradients = {flat_copy(item.gradient)};
  batch.exp_avgs = {flat_copy(item.state->exp_avg)};
  batch.exp_avg_sqs = {flat_copy(item.state->exp_avg_sq)};
  batch.steps = {item.state->step};
  run_kernel(batch, options);
  auto values = parameter.detach(), exp_avg = item.state->exp_avg,
       exp_avg_sq = item.state->exp_avg_sq;
  copy_unless_same(values, batch.parameters.front());
  copy_unless_same(exp_avg, batch.exp_avgs.front());
  copy_unless_same(exp_avg_sq, batch.exp_avg_sqs.front());
}

class Batches {
 public:
  explicit Batches(const AdamWOptions& options) : options_(options) {}

  void add_run(const Items& items, std::size_t begin, std::size_t end) {
    const auto& first = items[begin];
    auto found = std::ranges::find_if(batches_, [&](const auto& one) { return one.takes(first); });
    if (found == batches_.end()) found = batches_.insert(found, Batch(first));
    append_run(items, begin, end, *found);
    const bool is_full = found->bytes >= (found->device.is_cpu() ? 0 : kCastBytes);
    if (found->gradient_type == found->type || !is_full) return;
    run_kernel(*found, options_);
    batches_.erase(found);
  }
  void run() const {
    for (const auto& batch : batches_) run_kernel(batch, options_);
  }

 private:
  const AdamWOptions& options_;
  std::vector<Batch> batches_;
};

}  // namespace

void copy_unless_same(at::Tensor& into, const at::Tensor& from) {
  const bool is_same = into.const_data_ptr() == from.const_data_ptr() &&
                       into.scalar_type() == from.scalar_type() &&
                       into.strides() == from.strides() && is_plain(into) && is_plain(from);
  if (!is_same) into.copy_(from);
}

void update_adamw(const Items& items, const AdamWOptions& options) {
  Batches batches(options);
  for (std::size_t begin = 0; begin < items.size();) {
    auto end = begin + 1;
    if (!lies_flat(items[begin])) {
      update_copies(items[begin], options);
    } else {
      while (end < items.size() && joins(items[end], items[end - 1])) ++end;
      batches.add_run(items, begin, end);
    }
    begin = end;
  }
  batches.run();
}

}  // namespace tessera::detail

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
    // No other storage is made at its address while somebody points there.
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

// A state lies in the twin where the parameter lies in its shard.
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

// The tensors that a step updates; its number of steps is counted already.
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
  begin_step();
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
  await_copies();
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
  await_copies();
  for (auto& group : impl_->groups) {
    for (std::size_t i = 0; i < group.parameters.size(); ++i) {
      if (group.parameters[i].local.requires_grad())
        impl_->make_state(group.parameters[i], group.states[i]);
    }
  }
}

}  // namespace tessera
