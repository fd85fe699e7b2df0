#include "fsdp/bucket_reducer.h"

#include <torch/torch.h>

#include <utility>

#include "fsdp/quiet_copy.h"
#include "tessera/error.h"

namespace tessera::detail {
namespace {

int number_of(int unit, std::size_t bucket) {
  return unit * 32 + static_cast<int>(bucket % 32);
}

}  // namespace

BucketReducer::BucketReducer(std::vector<UnitParam>& params, const BucketReducerOptions& options)
    : params_(params),
      options_(options),
      scale_(GradScale::make(options.divisor, options.dtype)),
      bucket_of_(params.size()),
      has_arrived_(params.size()) {
  const auto size = static_cast<std::int64_t>(c10::elementSize(options.dtype));
  for (std::size_t i = params.size(); i-- > 0;) {
    const auto limit =
        buckets_.size() == 1 ? options.buckets.first_bucket_bytes : options.buckets.bucket_bytes;
    if (buckets_.empty() || buckets_.back().elements * size >= limit) buckets_.emplace_back();
    buckets_.back().params.push_back(i);
    buckets_.back().elements += params[i].full.numel();
    bucket_of_[i] = buckets_.size() - 1;
  }
}

void BucketReducer::begin(const BackwardPlan& plan) {
  id_ = plan.id;
  sync_ = plan.sync;
  launched_ = 0;
  for (auto& bucket : buckets_) {
    bucket.missing = 0;
    for (const auto param : bucket.params) {
      has_arrived_[param] = false;
      if (params_[param].full.requires_grad()) ++bucket.missing;
    }
  }
}

void BucketReducer::arrived(std::size_t param) {
  if (!sync_ || !early_) return;
  if (bucket_of_[param] < launched_) {
    throw Error(ErrorCode::unsupported,
                "a parameter got a second gradient in one backward after the first was sent off "
                "(it is used inside and outside of an activation checkpoint?)");
  }
  if (has_arrived_[param]) return;
  has_arrived_[param] = true;
  --buckets_[bucket_of_[param]].missing;
  while (launched_ < buckets_.size() && buckets_[launched_].missing == 0) launch(launched_);
}

void BucketReducer::launch(std::size_t index) {
  const torch::NoGradGuard no_grad;
  auto& bucket = buckets_[index];
  ++launched_;
  if (options_.ranks == 1 && !comm_hook()) return;
  std::vector<at::Tensor> gradients;
  const auto trailer = comm_hook() ? 0 : Trailer::size(bucket.params.size());
  bucket.values = torch::empty({bucket.elements + trailer},
                               params_.front().full.options().dtype(options_.dtype));
  std::int64_t at = 0;
  for (const auto param : bucket.params) {
    const auto count = params_[param].full.numel();
    const auto& gradient = gradients.emplace_back(params_[param].full.grad());
    if (!gradient.defined()) {
      zero_quietly(bucket.values, at, count);
    } else {
      require_reducible(gradient);
      copy_quietly(bucket.values, at, gradient.contiguous().view({-1}), 0, count);
    }
    at += count;
  }
  if (comm_hook()) {
    at::Tensor whole;
    comm_hook()(bucket.values, whole);
    return;
  }
  if (scale_.before != 1) bucket.values.narrow(0, 0, bucket.elements).div_(scale_.before);
  Trailer::write(gradients, number_of(id_, index), bucket.values);
  bucket.sum = options_.transport->start_sum(bucket.values);
}

bool BucketReducer::start() {
  while (launched_ < buckets_.size()) launch(launched_);
  return true;
}

void BucketReducer::finish() {
  const torch::NoGradGuard no_grad;
  for (auto& bucket : buckets_) {
    if (bucket.values.defined()) take_back(bucket);
  }
}

// The bucket becomes the memory of the gradients: nothing is copied back.
void BucketReducer::take_back(Bucket& bucket) {
  if (const auto sum = std::exchange(bucket.sum, nullptr)) sum->finish();
  const auto values = std::exchange(bucket.values, {});
  auto gradients = values.narrow(0, 0, bucket.elements);
  std::vector<bool> present(bucket.params.size(), true);
  if (!comm_hook()) {
    const auto number = number_of(id_, &bucket - buckets_.data());
    present = Trailer::read(values, bucket.params.size(), number, options_.ranks);
    call_hook(gradients);
    if (scale_.after != 1) gradients.div_(scale_.after);
  }
  std::int64_t at = 0;
  for (std::size_t k = 0; k < bucket.params.size(); ++k) {
    const auto& full = params_[bucket.params[k]].full;
    const auto mine = gradients.narrow(0, std::exchange(at, at + full.numel()), full.numel());
    // Detached: optimizers detach gradients in place, which views do not allow.
    if (present[k]) full.mutable_grad() = mine.view(full.sizes()).to(full.scalar_type()).detach();
  }
}

void BucketReducer::forget() {
  for (auto& bucket : buckets_) {
    if (bucket.sum) std::exchange(bucket.sum, nullptr)->finish();
    bucket.values = at::Tensor();
  }
}

}  // namespace tessera::detail
