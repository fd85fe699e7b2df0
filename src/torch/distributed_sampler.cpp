#include "tessera/distributed_sampler.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <algorithm>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "tessera/error.h"

namespace tessera {
namespace {

void require_same(const Value& state, const char* key, const Value& own) {
  if (state.at(key) == own) return;
  throw Error(ErrorCode::mismatch, "the sampler's state is of another data set or order")
      .at_key(key);
}

std::int64_t number(std::size_t value) {
  return static_cast<std::int64_t>(value);
}

std::size_t count_at(const Value& state, const char* key) {
  const auto count = state.at(key).as_int();
  if (count < 0) throw Error(ErrorCode::corrupt, "a count below 0").at_key(key);
  return static_cast<std::size_t>(count);
}

}  // namespace

DistributedSampler::DistributedSampler(std::size_t size, int num_replicas, int rank,
                                       const DistributedSamplerOptions& options)
    : size_(size),
      replicas_(static_cast<std::size_t>(std::max(num_replicas, 1))),
      rank_(static_cast<std::size_t>(std::max(rank, 0))),
      options_(options) {
  if (rank < 0 || rank >= num_replicas) {
    throw Error(ErrorCode::invalid_argument, "rank " + std::to_string(rank) + " of a sampler for " +
                                                 std::to_string(num_replicas) + " ranks");
  }
  make_order();
}

// PyTorch's order: a permutation by a generator of its own.
void DistributedSampler::make_order() {
  order_.resize(size_);
  if (options_.shuffle) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(options_.seed + epoch_);
    const auto drawn = torch::randperm(number(size_), generator, torch::kLong);
    std::ranges::copy(std::span(drawn.const_data_ptr<std::int64_t>(), size_), order_.begin());
  } else {
    std::iota(order_.begin(), order_.end(), std::size_t{0});
  }
  const auto first =
      std::vector<std::size_t>(order_.begin(), order_.begin() + number(std::min(size_, replicas_)));
  order_.erase(order_.begin(), order_.begin() + number(std::min(begin_, size_)));
  const auto over = order_.size() % replicas_;
  if (over == 0) return;
  if (options_.drop_last) return order_.resize(order_.size() - over);
  for (std::size_t i = 0; order_.size() % replicas_ != 0; ++i)
    order_.push_back(first[i % first.size()]);
}

std::size_t DistributedSampler::left() const {
  return order_.size() / replicas_ - taken_;
}

std::optional<std::vector<std::size_t>> DistributedSampler::next(std::size_t batch_size) {
  is_loaded_ = false;
  const auto count = std::min(batch_size, left());
  if (count == 0) return std::nullopt;
  std::vector<std::size_t> batch;
  for (std::size_t i = 0; i < count; ++i) batch.push_back(order_[(taken_ + i) * replicas_ + rank_]);
  taken_ += count;
  return batch;
}

void DistributedSampler::set_epoch(std::uint64_t epoch) {
  if (is_loaded_ && epoch == epoch_) return;
  epoch_ = epoch;
  is_loaded_ = false;
  reset();
}

void DistributedSampler::reset(std::optional<std::size_t> size) {
  if (std::exchange(is_loaded_, false) && size.value_or(size_) == size_) return;
  size_ = size.value_or(size_);
  begin_ = taken_ = 0;
  make_order();
}

Value DistributedSampler::state_dict() const {
  return Value::dict({{"epoch", static_cast<std::int64_t>(epoch_)},
                      {"taken", number(begin_ + taken_ * replicas_)},
                      {"size", number(size_)},
                      {"seed", static_cast<std::int64_t>(options_.seed)},
                      {"shuffle", options_.shuffle}});
}

void DistributedSampler::load_state_dict(const Value& state) {
  const Value own = state_dict();
  for (const char* key : {"size", "seed", "shuffle"}) require_same(state, key, own.at(key));
  const auto epoch = count_at(state, "epoch"), begin = count_at(state, "taken");
  epoch_ = epoch;
  begin_ = begin;
  taken_ = 0;
  is_loaded_ = true;
  make_order();
}

void DistributedSampler::save(torch::serialize::OutputArchive& archive) const {
  for (const auto& [key, value] : state_dict().pairs())
    archive.write(key.as_string(),
                  c10::IValue(value.is(Value::Kind::boolean) ? std::int64_t{value.as_bool()}
                                                             : value.as_int()));
}

void DistributedSampler::load(torch::serialize::InputArchive& archive) {
  auto state = Value::dict();
  for (const char* key : {"epoch", "taken", "size", "seed", "shuffle"}) {
    c10::IValue value;
    archive.read(key, value);
    state.set_item(
        key, std::string_view(key) == "shuffle" ? Value(value.toInt() != 0) : Value(value.toInt()));
  }
  load_state_dict(state);
}

}  // namespace tessera
