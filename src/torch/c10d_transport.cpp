#include "torch/c10d_transport.h"

#include <utility>

#include "torch/c10_error.h"
#include "torch/compat.h"

namespace tessera {
namespace {

class C10dChannel final : public Channel {
 public:
  C10dChannel(c10::intrusive_ptr<c10d::ProcessGroup> group, std::int64_t elements,
              const at::TensorOptions& options)
      : group_(std::move(group)), shard_(torch::zeros({elements}, options)) {}

  const at::Tensor& shard() const override { return shard_; }

  // Buffers live from start to finish only: a unit at rest costs its shard.
  void start_gather() override {
    gathered_ = torch::empty({group_->getSize() * shard_.numel()}, shard_.options());
    gather_ = communicate("gather of parameters",
                          [&] { return compat::all_gather(*group_, gathered_, shard_); });
  }

  void finish_gather(const Take& take) override {
    communicate("gather of parameters", [&] { gather_->wait(); });
    const auto gathered = std::exchange(gathered_, {});
    gather_.reset();
    const auto count = shard_.numel();
    for (int r = 0; r < group_->getSize(); ++r) {
      take(r, r == group_->getRank() ? shard_ : gathered.narrow(0, r * count, count));
    }
  }

  void start_reduce(std::int64_t elements, const Fill& fill) override {
    contributed_ = torch::empty({group_->getSize() * elements}, shard_.options());
    for (int r = 0; r < group_->getSize(); ++r) {
      auto slice = contributed_.narrow(0, r * elements, elements);
      fill(r, slice);
    }
    sum_ = torch::empty({elements}, shard_.options());
    reduce_ = communicate("reduction of gradients",
                          [&] { return compat::reduce_scatter(*group_, sum_, contributed_); });
  }

  at::Tensor finish_reduce() override {
    communicate("reduction of gradients", [&] { reduce_->wait(); });
    reduce_.reset();
    contributed_.reset();
    return std::exchange(sum_, {});
  }

 private:
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  at::Tensor shard_;
  at::Tensor gathered_;     // the shards of all ranks, while a gather is under way
  at::Tensor contributed_;  // slices for all ranks, while a reduction is under way
  at::Tensor sum_;
  c10::intrusive_ptr<c10d::Work> gather_;
  c10::intrusive_ptr<c10d::Work> reduce_;
};

class C10dTransport final : public Transport {
 public:
  explicit C10dTransport(c10::intrusive_ptr<c10d::ProcessGroup> group) : group_(std::move(group)) {}
  std::unique_ptr<Channel> open(std::int64_t elements, const at::TensorOptions& options) override {
    return std::make_unique<C10dChannel>(group_, elements, options);
  }

 private:
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
};

class SoloChannel final : public Channel {
 public:
  SoloChannel(std::int64_t elements, const at::TensorOptions& options)
      : shard_(torch::zeros({elements}, options)) {}
  const at::Tensor& shard() const override { return shard_; }
  void start_gather() override {}
  void finish_gather(const Take& take) override { take(0, shard_); }
  void start_reduce(std::int64_t elements, const Fill& fill) override {
    sum_ = torch::empty({elements}, shard_.options());
    fill(0, sum_);
  }
  at::Tensor finish_reduce() override { return std::exchange(sum_, {}); }

 private:
  at::Tensor shard_;
  at::Tensor sum_;
};

class SoloTransport final : public Transport {
 public:
  std::unique_ptr<Channel> open(std::int64_t elements, const at::TensorOptions& options) override {
    return std::make_unique<SoloChannel>(elements, options);
  }
};

}  // namespace

std::unique_ptr<Transport> make_c10d_transport(c10::intrusive_ptr<c10d::ProcessGroup> group) {
  return std::make_unique<C10dTransport>(std::move(group));
}

std::unique_ptr<Transport> make_solo_transport() {
  return std::make_unique<SoloTransport>();
}

}  // namespace tessera
