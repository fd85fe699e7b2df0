#include "fsdp/shard_reducer.h"

#include <torch/torch.h>

#include <algorithm>
#include <utility>

#include "fsdp/quiet_copy.h"
#include "tessera/error.h"

namespace tessera::detail {
namespace {

// Detached: optimizers detach gradients in place, which views do not allow. What the user hung
// behind the parameter's accumulation runs, as it does in PyTorch (9.3, step 8).
void accumulate(const at::Tensor& local, const at::Tensor& mine) {
  auto& gradient = local.mutable_grad();
  if (gradient.defined()) {
    gradient.add_(mine);
  } else {
    gradient = mine.detach();
  }
  if (const auto& hook = torch::autograd::impl::post_acc_grad_hooks(local)) (*hook)(local);
}

}  // namespace

ShardReducer::ShardReducer(std::vector<UnitParam>& params, ParamStore& store,
                           const ShardReducerOptions& options)
    : params_(params),
      store_(store),
      options_(options),
      scale_(GradScale::make(options.divisor, options.dtype)),
      kept_(params.size()) {}

// This rank's gradient, flat, with what earlier backwards left; undefined when there is none.
at::Tensor ShardReducer::gradient_of(std::size_t param) {
  auto gradient = std::exchange(params_[param].full.mutable_grad(), {});
  auto kept = std::exchange(kept_[param], {});
  if (!gradient.defined()) return kept.defined() ? kept.view({-1}) : kept;
  require_reducible(gradient);
  if (kept.defined()) gradient = kept.add_(gradient);
  return gradient.contiguous().view({-1});
}

// Of rows frozen parameters do not travel, so slices are those of the others alone. A flat array
// travels as a whole.
void ShardReducer::choose_slices(std::vector<std::size_t> travelling) {
  if (!slices_.runs.empty() && travelling == travelling_) return;
  travelling_ = std::move(travelling);
  if (options_.geometry != Geometry::rows) {
    slices_ = store_.layout();
    return;
  }
  std::vector<Shape> shapes;
  std::vector<int> dims;
  for (const auto param : travelling_) {
    shapes.push_back(store_.layout().params[param].shape);
    dims.push_back(store_.layout().params[param].dim);
  }
  slices_ = rows_layout(shapes, options_.shard_world, 1, dims);
}

bool ShardReducer::start() {
  std::vector<std::size_t> travelling;
  std::vector<at::Tensor> gradients;
  bool any = false;
  for (std::size_t i = 0; i < params_.size(); ++i) {
    const bool is_frozen = !params_[i].full.requires_grad();
    any = any || !is_frozen;
    if (is_frozen && options_.geometry == Geometry::rows) continue;
    travelling.push_back(i);
    gradients.push_back(is_frozen ? at::Tensor() : gradient_of(i));
  }
  if (!any) return false;
  choose_slices(std::move(travelling));
  under_way_ = true;
  if (comm_hook()) {
    reduce_by_hook(gradients);
    return true;
  }
  store_.channel().start_reduce(slices_.shard_elements + Trailer::size(travelling_.size()),
                                options_.dtype,
                                [&](int rank, at::Tensor& slice) { fill(rank, gradients, slice); });
  return true;
}

// The hook gets what a reduce-scatter would: the slices of all ranks end to end, and room for this
// rank's sum. What follows gradients otherwise does not go through it, so every parameter counts as
// having a gradient.
void ShardReducer::reduce_by_hook(const std::vector<at::Tensor>& gradients) {
  const torch::NoGradGuard no_grad;
  const auto count = slices_.shard_elements;
  const auto options = at::TensorOptions(store_.device()).dtype(options_.dtype);
  auto whole = at::empty({options_.shard_world * count}, options);
  for (int rank = 0; rank < options_.shard_world; ++rank) {
    auto slice = whole.narrow(0, rank * count, count);
    fill(rank, gradients, slice);
  }
  sum_ = at::empty({count}, options);
  comm_hook()(whole, sum_);
}

void ShardReducer::fill(int rank, const std::vector<at::Tensor>& gradients,
                        at::Tensor& slice) const {
  std::int64_t done = 0;
  for (const auto& run : slices_.runs[rank]) {
    if (!gradients[run.param].defined()) continue;
    zero_quietly(slice, done, run.shard_offset - done);
    copy_quietly(slice, run.shard_offset, gradients[run.param], run.param_offset, run.count);
    done = run.shard_offset + run.count;
  }
  zero_quietly(slice, done, slices_.shard_elements - done);
  if (comm_hook()) return;
  if (scale_.before != 1) slice.narrow(0, 0, slices_.shard_elements).div_(scale_.before);
  Trailer::write(gradients, plan_.id, slice);
}

void ShardReducer::advance() {
  if (!under_way_ || sum_.defined()) return;
  const torch::NoGradGuard no_grad;
  sum_ = store_.channel().finish_reduce();
  if (options_.replicas == nullptr) return;
  add_waiting();
  if (plan_.replicas) over_replicas_ = options_.replicas->start_sum(sum_);
}

void ShardReducer::add_waiting() {
  if (!waiting_.defined()) return;
  if (waiting_.numel() != sum_.numel()) {
    throw Error(ErrorCode::invalid_argument,
                "parameters were frozen or thawed between backwards whose gradients have not been "
                "summed over the copies yet");
  }
  sum_.add_(std::exchange(waiting_, {}));
}

void ShardReducer::finish() {
  if (!under_way_) return;
  const torch::NoGradGuard no_grad;
  if (comm_hook()) {
    under_way_ = false;
    give(std::exchange(sum_, {}), std::vector<bool>(travelling_.size(), true));
    return;
  }
  advance();
  under_way_ = false;
  ++waiting_count_;
  if (options_.replicas != nullptr && !over_replicas_) {
    waiting_ = std::exchange(sum_, {});
    return;
  }
  if (over_replicas_) over_replicas_->finish();
  over_replicas_.reset();
  const auto sum = std::exchange(sum_, {});
  const auto present = Trailer::read(sum, travelling_.size(), plan_.id,
                                     options_.ranks * std::exchange(waiting_count_, 0));
  auto reduced = sum.narrow(0, 0, slices_.shard_elements);
  call_hook(reduced);
  auto average = reduced.to(options_.kept_dtype);
  if (scale_.after != 1) average.div_(scale_.after);
  give(average, present);
}

void ShardReducer::give(const at::Tensor& average, const std::vector<bool>& present) {
  // Where parameters are offloaded the shard is on another device.
  const auto gradients = average.to(store_.shard().device(), options_.kept_dtype);
  if (options_.geometry == Geometry::flat) {
    if (std::ranges::count(present, true) > 0) accumulate(params_.front().local, gradients);
    return;
  }
  // FSDP1's backward takes away what a frozen parameter has left of earlier ones.
  if (options_.geometry == Geometry::flat_original) {
    for (const auto& param : params_) {
      if (!param.full.requires_grad()) param.local.mutable_grad() = at::Tensor();
    }
  }
  for (std::size_t k = 0; k < travelling_.size(); ++k) {
    if (!present[k]) continue;
    const auto& local = params_[travelling_[k]].local;
    // FSDP1 leaves what a rank does not hold without a gradient, so that optimizers keep no state
    // of it (optimizer-state L-3).
    if (options_.geometry == Geometry::flat_original && local.numel() == 0) continue;
    const auto offset = slices_.local[store_.rank()][k].shard_offset;
    accumulate(local, gradients.narrow(0, offset, local.numel()).view(local.sizes()));
  }
}

// In the dtype of reductions, which may be wider than that of the computation (spec P10).
void ShardReducer::keep() {
  const torch::NoGradGuard no_grad;
  for (std::size_t i = 0; i < params_.size(); ++i) {
    const auto& gradient = params_[i].full.grad();
    if (!gradient.defined() || gradient.scalar_type() == options_.dtype) continue;
    if (kept_[i].defined()) {
      kept_[i].add_(gradient);
    } else {
      kept_[i] = gradient.to(options_.dtype);
    }
    params_[i].full.mutable_grad() = at::Tensor();
  }
}

void ShardReducer::forget() {
  if (std::exchange(under_way_, false)) {
    if (!sum_.defined()) sum_ = store_.channel().finish_reduce();
    if (over_replicas_) over_replicas_->finish();
  }
  over_replicas_.reset();
  sum_ = at::Tensor();
  waiting_ = at::Tensor();
  waiting_count_ = 0;
  for (auto& kept : kept_) kept = at::Tensor();
}

}  // namespace tessera::detail
