#include "fsdp/unit/bucket_reducer.h"

#include <torch/csrc/autograd/utils/grad_layout_contract.h>
#include <torch/torch.h>

#include <algorithm>
#include <string>
#include <utility>

#include "base/text.h"
#include "fsdp/unit/whole_copies.h"
#include "tessera/collectives.h"
#include "tessera/error.h"
#include "torch/c10_error.h"
#include "torch/device.h"
#include "torch/tensor.h"

namespace tessera::detail {
namespace {

// Nobody else sees its memory, so that it may be summed where it is: gradients of two parameters
// can be views of one array. Autograd itself holds one that is just arriving once more.
bool is_alone(const at::Tensor& gradient, bool arriving) {
  return gradient.is_contiguous() && is_plain(gradient) &&
         gradient.storage().use_count() <= (arriving ? 2U : 1U);
}

// The gradient, or zeros if there is none.
at::Tensor reducible_gradient(const at::Tensor& full) {
  const auto& gradient = full.grad();
  if (!gradient.defined()) return at::zeros(full.sizes(), full.options().requires_grad(false));
  require_reducible(gradient);
  return gradient;
}

bool has_values(const at::Tensor& gradient) {
  const auto values = gradient.is_sparse() ? gradient._values() : gradient;
  return values.count_nonzero().item<std::int64_t>() > 0;
}

// A sparse gradient of a table, without a row.
at::Tensor no_rows(const at::Tensor& full) {
  const auto places = at::empty({1, 0}, full.options().dtype(at::kLong));
  const auto values = at::empty({0, full.size(1)}, full.options());
  return at::sparse_coo_tensor(places, values, full.sizes(), full.options().layout(at::kSparse))
      .coalesce();
}

// The values of all ranks along dimension `dim`, where rank r has `counts[r]`.
at::Tensor gathered(const at::Tensor& mine, std::int64_t dim,
                    const std::vector<std::int64_t>& counts, const Mesh& mesh) {
  auto shape = mine.sizes().vec();
  shape[dim] = *std::ranges::max_element(counts);
  auto sent = at::zeros(shape, mine.options());
  sent.narrow(dim, 0, mine.size(dim)).copy_(mine);
  auto all = all_gather(sent, mesh);
  for (std::size_t rank = 0; rank < all.size(); ++rank)
    all[rank] = all[rank].narrow(dim, 0, counts[rank]);
  return at::cat(all, dim);
}

// As autograd would leave it: whatever takes parameters and gradients as flat memory finds them
// alike. Detached: optimizers detach gradients in place, which views do not allow.
void give(const at::Tensor& full, const at::Tensor& gradient) {
  using torch::autograd::utils::clone_obey_contract;
  using torch::autograd::utils::obeys_layout_contract;
  full.mutable_grad() = obeys_layout_contract(gradient, full) ? gradient.detach()
                                                              : clone_obey_contract(gradient, full);
}

}  // namespace

BucketReducer::BucketReducer(std::vector<UnitParam>& params, const BucketReducerOptions& options)
    : GradReducer(options.divisor, options.dtype),
      params_(params),
      options_(options),
      bucket_of_(params.size()),
      has_arrived_(params.size()),
      past_(params.size()) {
  for (std::size_t i = params.size(); i-- > 0;) add_to_bucket(i);
}

void BucketReducer::add_to_bucket(std::size_t param) {
  if (needs_bucket(param)) buckets_.emplace_back();
  auto& bucket = buckets_.back();
  bucket.params.push_back(param);
  bucket.elements += params_[param].full.numel();
  bucket.sparse = options_.sparse[param];
  bucket_of_[param] = buckets_.size() - 1;
}

// Before the first parameter, when the last bucket is full, and around a sparse gradient.
bool BucketReducer::needs_bucket(std::size_t param) const {
  if (options_.sparse[param] || (!buckets_.empty() && buckets_.back().sparse)) return true;
  const auto size = static_cast<std::int64_t>(c10::elementSize(options_.dtype));
  const auto limit =
      buckets_.size() == 1 ? options_.buckets.first_bucket_bytes : options_.buckets.bucket_bytes;
  return buckets_.empty() || buckets_.back().elements * size >= limit;
}

void BucketReducer::begin(const BackwardPlan& plan) {
  adopt_rules();
  id_ = plan.id;
  pass_ = plan.pass;
  trained_ = digest_of_trained(params_);
  sync_ = plan.sync;
  begun_ = true;
  launched_ = 0;
  for (auto& bucket : buckets_) {
    bucket.missing = 0;
    for (const auto param : bucket.params) {
      set_aside(param);
      has_arrived_[param] = false;
      const bool was_trained = std::exchange(params_[param].in_graph, false);
      if (params_[param].full.requires_grad() || was_trained) ++bucket.missing;
    }
  }
}

// The average of averages is what they are, so they may be reduced with what is new, as
// DistributedDataParallel does it. With another divisor or a hook they would become something else.
bool BucketReducer::may_average_again() const {
  return !comm_hook() && !has_hook() && scale().before * scale().after == options_.ranks;
}

bool BucketReducer::may_set(const AverageRules& rules) const {
  return (!rules.hook && rules.divisor == options_.ranks) || !mixes_averages();
}

bool BucketReducer::mixes_averages() const {
  for (std::size_t i = 0; i < params_.size(); ++i) {
    const auto& gradient = params_[i].full.grad();
    if (past_[i].is_mixed && gradient.defined() && has_values(gradient)) return true;
  }
  return false;
}

// Sets aside what earlier backwards have averaged, where it is not reduced again. Whoever took away
// or zeroed what was kept since meant all of it; what else was done to it, nobody knows for the
// average.
void BucketReducer::set_aside(std::size_t param) {
  auto& gradient = params_[param].full.mutable_grad();
  auto& past = past_[param];
  if (!gradient.defined()) past.has_kept = false;
  const bool is_changed = past.has_kept && gradient._version() != past.version;
  const bool is_zero = is_changed && !has_values(gradient);
  if (is_changed && !is_zero && past.average.defined()) {
    throw Error(ErrorCode::unsupported,
                "a gradient was changed between a backward without sync and one with it, where "
                "averages are set aside for a divide factor or a hook: change it after the latter");
  }
  if (!past.has_kept || is_changed) past.average = at::Tensor();
  if (is_zero) past.is_mixed = false;
  if (past.has_kept) return;
  past.is_mixed = !sync_ && gradient.defined() && may_average_again();
  if (!may_average_again()) past.average = std::exchange(gradient, {});
}

void BucketReducer::put_back(std::size_t param) {
  auto average = std::exchange(past_[param].average, {});
  past_[param].has_kept = past_[param].is_mixed = false;
  if (!average.defined()) return;
  auto& gradient = params_[param].full.mutable_grad();
  if (gradient.defined()) average.add_(gradient);
  gradient = std::move(average);
}

bool BucketReducer::arrived(std::size_t param) {
  if (!sync_ || !early_) return true;
  if (bucket_of_[param] < launched_) return false;
  if (has_arrived_[param]) return true;
  has_arrived_[param] = true;
  --buckets_[bucket_of_[param]].missing;
  arriving_ = param;
  launch_complete();
  arriving_.reset();
  return true;
}

// In their order: one waits for those before it.
void BucketReducer::launch_complete() {
  while (launched_ < buckets_.size() && buckets_[launched_].missing == 0) launch(launched_);
}

// Sent along, so that ranks do not add up different buckets.
Reduced BucketReducer::reduced_of(const Bucket& bucket) const {
  const auto place = static_cast<std::uint32_t>(&bucket - buckets_.data());
  return {.id = id_ * 32 + place % 32, .pass = pass_, .trained = trained_};
}

// Nobody wants to see the sum, which is exact in the gradients' own memory.
bool BucketReducer::may_sum_in_place() const {
  return is_one_of(options_.dtype, at::kFloat, at::kDouble) && may_average_again();
}

// Without an array for the bucket, where the transport can.
bool BucketReducer::launch_in_place(Bucket& bucket) {
  if (!may_sum_in_place()) return false;
  std::vector<at::Tensor> gradients, parts;
  for (const auto param : bucket.params) {
    const auto& full = params_[param].full;
    gradients.push_back(full.grad());
    parts.push_back(reducible_gradient(full));
    if (parts.back().scalar_type() != options_.dtype || !is_alone(parts.back(), param == arriving_))
      return false;
  }
  bucket.has_all = are_all_defined(gradients);
  auto trailer = Trailer::make(gradients, reduced_of(bucket), parts.front().options());
  bucket.sum = options_.transport->start_average(parts, trailer);
  if (!bucket.sum) return false;
  bucket.gradients = std::move(parts);
  bucket.trailer = std::move(trailer);
  return true;
}

void BucketReducer::launch(std::size_t index) {
  const torch::NoGradGuard no_grad;
  auto& bucket = buckets_[index];
  ++launched_;
  if (options_.ranks == 1 && may_average_again()) return;
  if (bucket.sparse) return launch_rows(bucket);
  if (launch_in_place(bucket)) return;
  const auto trailer = comm_hook() ? 0 : Trailer::size(bucket.params.size());
  bucket.values = torch::empty({bucket.elements + trailer},
                               params_.front().full.options().dtype(options_.dtype));
  const auto gradients = fill_values(bucket);
  if (comm_hook()) {
    at::Tensor whole;
    comm_hook()(bucket.values, whole);
    return;
  }
  sum_values(bucket, gradients);
}

// How many rows each rank has, and how many ranks have a gradient that is dense.
void BucketReducer::launch_rows(Bucket& bucket) {
  const auto& full = params_[bucket.params.front()].full;
  const auto& gradient = full.grad();
  if (has_hook()) {
    throw Error(ErrorCode::unsupported,
                "an all-reduce hook takes sums in one dimension, not a sparse gradient");
  }
  bucket.rows = no_rows(full);
  auto counts = at::zeros({options_.ranks + 1}, at::kDouble);
  if (gradient.defined()) {
    require_without_graph(gradient);
    if (gradient.is_sparse()) bucket.rows = gradient.coalesce();
    counts[options_.ranks] = gradient.is_sparse() ? 0 : 1;
  }
  counts[options_.mesh.rank()] = bucket.rows._nnz();
  const auto trailer = Trailer::make({gradient}, reduced_of(bucket), counts.options());
  bucket.values = at::cat({counts, trailer}).to(full.device());
  bucket.sum = options_.transport->start_sum(bucket.values);
}

// The gradients that it filled the values with, by parameter.
std::vector<at::Tensor> BucketReducer::fill_values(Bucket& bucket) {
  std::vector<at::Tensor> gradients, to, from;
  const bool is_there = is_accelerator(bucket.values.device());  // where one kernel copies many
  std::int64_t at = 0;
  for (const auto param : bucket.params) {
    const auto count = params_[param].full.numel();
    const auto& gradient = gradients.emplace_back(params_[param].full.grad());
    const auto begin = std::exchange(at, at + count);
    if (!gradient.defined()) {
      zero_quietly(bucket.values, begin, count);
      continue;
    }
    require_reducible(gradient);
    const auto values = gradient.contiguous().view({-1});
    if (is_there) {
      to.push_back(bucket.values.narrow(0, begin, count));
      from.push_back(values);
    } else {
      copy_quietly(bucket.values, begin, values, 0, count);
    }
  }
  if (!to.empty()) at::_foreach_copy_(to, from);
  return gradients;
}

void BucketReducer::sum_values(Bucket& bucket, const std::vector<at::Tensor>& gradients) {
  if (scale().before != 1) bucket.values.narrow(0, 0, bucket.elements).div_(scale().before);
  bucket.has_all = are_all_defined(gradients);
  const auto trailer = Trailer::make(gradients, reduced_of(bucket), bucket.values.options());
  copy_quietly(bucket.values, bucket.elements, trailer, 0, trailer.numel());
  // What follows the gradients is asked only whether it is zero.
  if (may_average_again() && scale().before == 1)
    bucket.sum = options_.transport->start_mean(bucket.values);
  bucket.averages = bucket.sum != nullptr;
  if (!bucket.averages) bucket.sum = options_.transport->start_sum(bucket.values);
}

bool BucketReducer::start() {
  while (launched_ < buckets_.size()) launch(launched_);
  return true;
}

void BucketReducer::finish() {
  const torch::NoGradGuard no_grad;
  begun_ = false;
  for (auto& bucket : buckets_) {
    if (!bucket.gradients.empty()) take_back_in_place(bucket);
    if (!bucket.values.defined()) continue;
    if (bucket.sparse) {
      take_back_rows(bucket);
    } else {
      take_back(bucket);
    }
  }
  for (std::size_t i = 0; i < params_.size(); ++i) put_back(i);
}

// What was averaged before stays aside, unless there is nothing to keep.
void BucketReducer::keep() {
  for (std::size_t i = 0; i < params_.size(); ++i) {
    auto& gradient = params_[i].full.mutable_grad();
    auto& past = past_[i];
    past.has_kept = gradient.defined();
    if (past.has_kept) {
      past.version = static_cast<std::uint32_t>(gradient._version());
    } else {
      gradient = std::exchange(past.average, {});
    }
  }
}

void BucketReducer::take_back_in_place(Bucket& bucket) {
  std::exchange(bucket.sum, nullptr)->finish();
  const auto trailer = std::exchange(bucket.trailer, {});
  const auto gradients = std::exchange(bucket.gradients, {});
  const auto present =
      read_trailer(trailer, bucket.params.size(), reduced_of(bucket), bucket.has_all);
  for (std::size_t k = 0; k < gradients.size(); ++k) {
    const auto& full = params_[bucket.params[k]].full;
    if (present[k] && !full.grad().defined()) give(full, gradients[k]);
  }
}

// The bucket becomes the memory of the gradients: nothing is copied back.
void BucketReducer::take_back(Bucket& bucket) {
  if (const auto sum = std::exchange(bucket.sum, nullptr)) sum->finish();
  const auto values = std::exchange(bucket.values, {});
  auto gradients = values.narrow(0, 0, bucket.elements);
  std::vector<bool> present(bucket.params.size(), true);
  if (!comm_hook()) {
    present = read_trailer(values, bucket.params.size(), reduced_of(bucket), bucket.has_all);
    call_hook(gradients);
    if (!bucket.averages && scale().after != 1) gradients.div_(scale().after);
  }
  std::int64_t at = 0;
  for (std::size_t k = 0; k < bucket.params.size(); ++k) {
    const auto& full = params_[bucket.params[k]].full;
    const auto mine = gradients.narrow(0, std::exchange(at, at + full.numel()), full.numel());
    if (present[k]) give(full, mine.view(full.sizes()).to(full.scalar_type()));
  }
}

// Added up where ranks have the same ones: the average stays sparse.
void BucketReducer::take_back_rows(Bucket& bucket) {
  if (const auto sum = std::exchange(bucket.sum, nullptr)) sum->finish();
  const auto values = std::exchange(bucket.values, {});
  const auto mine = std::exchange(bucket.rows, {});
  const auto& full = params_[bucket.params.front()].full;
  const bool is_present = Trailer::read(values, 1, reduced_of(bucket)).front();
  const auto sums = values.narrow(0, 0, options_.ranks + 1).to(at::kCPU, at::kLong);
  const auto* counts = sums.const_data_ptr<std::int64_t>();
  if (counts[options_.ranks] != 0) {
    throw Error(ErrorCode::unsupported, "an embedding with sparse(true) got a dense gradient on " +
                                            std::to_string(counts[options_.ranks]) +
                                            " ranks: its weight was used outside of it");
  }
  if (is_present) full.mutable_grad() = rows_of_all(mine, {counts, counts + options_.ranks});
}

at::Tensor BucketReducer::rows_of_all(const at::Tensor& mine,
                                      const std::vector<std::int64_t>& counts) const {
  if (*std::ranges::max_element(counts) == 0) return mine;
  auto values = mine._values();
  if (scale().before != 1) values = values / scale().before;
  const auto places = gathered(mine._indices(), 1, counts, options_.mesh);
  const auto all = at::sparse_coo_tensor(places, gathered(values, 0, counts, options_.mesh),
                                         mine.sizes(), mine.options())
                       .coalesce();
  if (scale().after != 1) all._values().div_(scale().after);
  return all;
}

// The buckets that left before the exception depend on the rank, so those that did not leave now.
void BucketReducer::forget() {
  if (std::exchange(begun_, false) && sync_ && early_)
    finish_unwanted([&] { static_cast<void>(start()); });
  for (auto& bucket : buckets_) forget(bucket);
  forget_late();
  past_.assign(params_.size(), {});
}

void BucketReducer::forget(Bucket& bucket) {
  if (const auto sum = std::exchange(bucket.sum, nullptr)) finish_unwanted([&] { sum->finish(); });
  bucket.values = at::Tensor();
  bucket.gradients.clear();
  bucket.trailer = at::Tensor();
  bucket.rows = at::Tensor();
}

}  // namespace tessera::detail
