#include "optim/adamw_update.h"

#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_fused_adamw.h>
#include <torch/csrc/autograd/utils/grad_layout_contract.h>
#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <utility>

#include "torch/tensor.h"

namespace tessera::detail {
namespace {

using Items = std::vector<AdamWItem>;

// Gradients of another dtype than their parameters are cast before the kernel. Low precision was to
// save memory: on the CPU one run at a time has its gradients in the parameters' dtype. On a device
// each time costs launches, and its kernels take about as much as this at once anyway.
constexpr std::size_t kCastBytes = std::size_t{128} << 20;

// What the kernel takes: lists of tensors of equal shapes. A device's kernel takes tensors of one
// dtype.
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
