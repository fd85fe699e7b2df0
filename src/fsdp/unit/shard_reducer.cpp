#include "fsdp/unit/shard_reducer.h"

#include <c10/core/StreamGuard.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <string>
#include <utility>

#include "fsdp/unit/whole_copies.h"
#include "tessera/error.h"
#include "torch/c10_error.h"
#include "torch/device.h"
#include "torch/rank_local.h"

namespace tessera::detail {
namespace {

// Detached: optimizers detach gradients in place, which views do not allow. What the user hung
// behind the parameter's accumulation runs, as it does in PyTorch (9.3, step 8). `is_part`: of a
// gradient, which norms and the like are to refuse.
void accumulate(const at::Tensor& local, const at::Tensor& mine, bool is_part) {
  auto& gradient = local.mutable_grad();
  if (gradient.defined()) {
    gradient.add_(mine);
  } else {
    gradient = is_part ? as_rank_local(mine) : mine.detach();
  }
  if (const auto& hook = torch::autograd::impl::post_acc_grad_hooks(local)) (*hook)(local);
}

}  // namespace

ShardReducer::ShardReducer(std::vector<UnitParam>& params, ParamStore& store,
                           const ShardReducerOptions& options)
    : GradReducer(options.divisor, options.dtype),
      params_(params),
      store_(store),
      options_(options),
      kept_(params.size()),
      owed_(params.size()) {}

// Autograd adds to what is kept, if it can.
void ShardReducer::begin(const BackwardPlan& plan) {
  plan_ = plan;
  for (std::size_t i = 0; i < params_.size(); ++i) {
    auto& gradient = params_[i].full.mutable_grad();
    if (gradient.defined() || !kept_[i].defined()) continue;
    if (kept_[i].scalar_type() == params_[i].full.scalar_type())
      gradient = std::exchange(kept_[i], {});
  }
}

// This rank's gradient, flat, with what earlier backwards left; undefined when there is none.
at::Tensor ShardReducer::gradient_of(std::size_t param) {
  auto gradient = std::exchange(params_[param].full.mutable_grad(), {});
  auto kept = std::exchange(kept_[param], {});
  if (!gradient.defined()) return kept.defined() ? kept.view({-1}) : kept;
  require_reducible(gradient);
  if (kept.defined()) gradient = kept.add_(gradient);
  return gradient.contiguous().view({-1});
}

void ShardReducer::choose_slices(std::vector<std::size_t> travelling) {
  if (slices_ && travelling == travelling_) return;
  travelling_ = std::move(travelling);
  slices_ = std::make_shared<const UnitLayout>(slices_of_travelling());
}

// Frozen parameters do not travel, so slices are those of the others alone. FSDP1's flat arrays
// travel as a whole.
UnitLayout ShardReducer::slices_of_travelling() const {
  if (options_.geometry != Geometry::rows)
    return travelling_.size() == params_.size() ? store_.layout()
                                                : packed(store_.layout(), travelling_);
  std::vector<Shape> shapes;
  std::vector<int> dims;
  for (const auto param : travelling_) {
    shapes.push_back(store_.layout().params[param].shape);
    dims.push_back(store_.layout().params[param].dim);
  }
  return rows_layout(shapes, options_.shard_world, 1, dims);
}

// [parameter] It has gradients for this reduction. What is kept of one that was frozen since
// belongs to it too, but FSDP1 takes that away.
std::vector<bool> ShardReducer::travels() const {
  std::vector<bool> all;
  for (std::size_t i = 0; i < params_.size(); ++i)
    all.push_back(params_[i].full.requires_grad() || (!is_fsdp1() && owed_[i]));
  return all;
}

// This rank's gradients of the parameters that travel, which it finds; undefined where there is
// none.
std::vector<at::Tensor> ShardReducer::take_gradients() {
  const auto has_gradient = travels();
  std::vector<std::size_t> travelling;
  std::vector<at::Tensor> gradients;
  for (std::size_t i = 0; i < params_.size(); ++i) {
    auto gradient = gradient_of(i);
    owed_[i] = false;
    if (!has_gradient[i] && !is_fsdp1()) continue;
    travelling.push_back(i);
    gradients.push_back(has_gradient[i] ? std::move(gradient) : at::Tensor());
  }
  choose_slices(std::move(travelling));
  return gradients;
}

// Whoever wants the sum before it is divided, or divided by something else, does it at the end.
bool ShardReducer::may_average() const {
  return !has_hook() && options_.replicas == nullptr && options_.kept_dtype == options_.dtype &&
         scale().after == options_.shard_world;
}

bool ShardReducer::start() {
  adopt_rules();
  const auto trained = travels();
  auto gradients = take_gradients();
  if (std::ranges::none_of(trained, std::identity())) return false;
  // Sums that wait are of several passes; the first one's number stands for them.
  const auto pass = waiting_.defined() ? waiting_for_.pass : plan_.pass;
  reduced_ = {.id = plan_.id, .pass = pass, .trained = digest_of_trained(trained)};
  if (comm_hook()) {
    reduce_by_hook(std::move(gradients));
    under_way_ = true;
    return true;
  }
  averages_ = may_average();
  has_all_ = are_all_defined(gradients);
  const auto elements = slices_->shard_elements;
  const SliceSum sum{.elements = elements + Trailer::size(travelling_.size()),
                     .dtype = options_.dtype,
                     .averaged = averages_ ? elements : 0,
                     .what = "gradients of " + std::to_string(travelling_.size()) + " of " +
                             std::to_string(params_.size()) + " parameters"};
  if (!store_.channel().moves_whole()) {
    store_.channel().start_reduce(sum, fill_of(std::move(gradients)));
    under_way_ = true;
    return true;
  }
  auto slices = whole_slices(gradients);
  store_.channel().start_whole_reduce(sum, slices);
  under_way_ = true;
  if (options_.replicas != nullptr && plan_.replicas) start_sum_beside(std::move(slices));
  return true;
}

// On a device the sum over the copies is queued at once, on a stream of its own, which waits for
// the slices, and for what came before them. The stream that computes waits when the average is
// taken.
void ShardReducer::start_sum_beside(at::Tensor slices) {
  beside_.push_back(std::move(slices));
  const auto& sums = plan_.pool->sums(store_.device());
  sums.follow_current();
  const c10::StreamGuard guard(sums.stream());
  advance();
}

// The hook gets what a reduce-scatter would: the slices of all ranks end to end, and room for this
// rank's sum. What follows gradients otherwise does not go through it, so every parameter counts as
// having a gradient.
void ShardReducer::reduce_by_hook(std::vector<at::Tensor> gradients) {
  const torch::NoGradGuard no_grad;
  const auto count = slices_->shard_elements;
  const auto options = at::TensorOptions(store_.device()).dtype(options_.dtype);
  auto whole = at::empty({options_.shard_world * count}, options);
  const auto fill = fill_of(std::move(gradients));
  for (int rank = 0; rank < options_.shard_world; ++rank)
    fill(rank, 0, whole.narrow(0, rank * count, count));
  sum_ = at::empty({count}, options);
  comm_hook()(whole, sum_);
}

at::Tensor ShardReducer::whole_slices(const std::vector<at::Tensor>& gradients) const {
  const torch::NoGradGuard no_grad;
  const auto options = at::TensorOptions(store_.device()).dtype(options_.dtype);
  const auto trailer =
      Trailer::make_rows(gradients, reduced_, options, static_cast<int>(slices_->runs.size()));
  auto whole = join_slices(*slices_, gradients, trailer);
  if (scale().before != 1) whole.narrow(1, 0, slices_->shard_elements).div_(scale().before);
  return whole.view({-1});
}

// Self-contained: the transport may call it when this unit is gone.
Channel::Fill ShardReducer::fill_of(std::vector<at::Tensor> gradients) const {
  const auto trailer =
      Trailer::make(gradients, reduced_, at::TensorOptions(store_.device()).dtype(options_.dtype));
  // A hook divides by itself.
  const double divisor = comm_hook() ? 1 : scale().before;
  return [slices = slices_, gradients = std::move(gradients), trailer, divisor](
             int rank, std::int64_t begin, const at::Tensor& part) {
    const torch::NoGradGuard no_grad;
    const auto end = begin + part.numel();
    const auto body = std::max(begin, std::min(end, slices->shard_elements));
    const auto& runs = slices->runs[rank];
    auto done = begin;
    for (auto run = first_run(runs, begin); run != runs.end() && run->local < end; ++run) {
      const auto& gradient = gradients[run->param];
      if (!gradient.defined()) continue;
      const auto first = std::max(begin, run->local);
      const auto last = std::min(end, run->local + run->count);
      zero_quietly(part, done - begin, first - done);
      copy_quietly(part, first - begin, gradient, run->global + first - run->local, last - first);
      done = last;
    }
    zero_quietly(part, done - begin, body - done);
    if (divisor != 1) part.narrow(0, 0, body - begin).div_(divisor);
    copy_quietly(part, body - begin, trailer, body - slices->shard_elements, end - body);
  };
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
  if (waiting_for_.id != reduced_.id || waiting_for_.trained != reduced_.trained) {
    throw Error(ErrorCode::invalid_argument,
                "parameters were frozen or thawed between backwards whose gradients have not been "
                "summed over the copies yet");
  }
  // Another divisor may have been set since.
  if (waiting_divided_by_ != scale().before) waiting_.mul_(waiting_divided_by_ / scale().before);
  sum_.add_(waiting_);
  if (!beside_.empty()) beside_.push_back(waiting_);
  waiting_ = at::Tensor();
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
  if (options_.replicas != nullptr && !over_replicas_) {
    waiting_ = std::exchange(sum_, {});
    waiting_for_ = reduced_;
    waiting_divided_by_ = scale().before;
    return;
  }
  if (over_replicas_) over_replicas_->finish();
  over_replicas_.reset();
  beside_.clear();
  finish_sum(std::exchange(sum_, {}));
}

void ShardReducer::finish_sum(const at::Tensor& sum) {
  const auto present = read_trailer(sum, travelling_.size(), reduced_, has_all_);
  auto reduced = sum.narrow(0, 0, slices_->shard_elements);
  if (averages_) return give(reduced, present);
  call_hook(reduced);
  // Divided in the wider of the two types: one rounding, as in PyTorch, where what is kept is
  // narrower than what was summed.
  auto average = reduced.to(at::promote_types(options_.dtype, options_.kept_dtype));
  if (scale().after != 1) average.div_(scale().after);
  give(average, present);
}

void ShardReducer::give(const at::Tensor& average, const std::vector<bool>& present) {
  // The shard is on another device if parameters are offloaded.
  const auto gradients = average.to(store_.shard().device(), options_.kept_dtype);
  if (options_.geometry == Geometry::flat) {
    if (std::ranges::count(present, true) > 0)
      accumulate(params_.front().local, gradients, options_.shard_world > 1);
    return;
  }
  if (is_fsdp1()) drop_frozen_gradients();
  give_each(gradients, present);
}

// FSDP1's backward takes away what a frozen parameter has left of earlier ones.
void ShardReducer::drop_frozen_gradients() {
  for (const auto& param : params_) {
    if (!param.full.requires_grad()) param.local.mutable_grad() = at::Tensor();
  }
}

void ShardReducer::give_each(const at::Tensor& gradients, const std::vector<bool>& present) {
  for (std::size_t k = 0; k < travelling_.size(); ++k) {
    if (!present[k]) continue;
    const auto& local = params_[travelling_[k]].local;
    // FSDP1 leaves what a rank does not hold without a gradient, so that optimizers keep no state
    // of it (optimizer-state L-3).
    if (is_fsdp1() && local.numel() == 0) continue;
    const auto offset = slices_->parts[store_.rank()][k].base;
    accumulate(local, gradients.narrow(0, offset, local.numel()).view(local.sizes()),
               options_.shard_world > 1);
  }
}

// In the dtype of reductions, which may be wider than that of the computation (fsdp-rows P10).
void ShardReducer::keep() {
  const torch::NoGradGuard no_grad;
  for (std::size_t i = 0; i < params_.size(); ++i) {
    owed_[i] = owed_[i] || params_[i].full.requires_grad();
    const auto gradient = std::exchange(params_[i].full.mutable_grad(), {});
    if (!gradient.defined()) continue;
    require_reducible(gradient);
    if (kept_[i].defined()) {
      kept_[i].add_(gradient);
    } else {
      kept_[i] = gradient.to(options_.dtype);
    }
  }
}

void ShardReducer::forget() {
  if (std::exchange(under_way_, false)) {
    finish_unwanted([&] {
      if (!sum_.defined()) sum_ = store_.channel().finish_reduce();
      if (over_replicas_) over_replicas_->finish();
    });
  }
  // Also where the sum was not started.
  if (!beside_.empty())
    make_current_wait(plan_.pool->sums(store_.device()).mark(), store_.device());
  beside_.clear();
  over_replicas_.reset();
  forget_late();
  sum_ = at::Tensor();
  waiting_ = at::Tensor();
  for (auto& kept : kept_) kept = at::Tensor();
  owed_.assign(params_.size(), false);
}

}  // namespace tessera::detail
