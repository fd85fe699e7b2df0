#include "torch/transport.h"

#include <utility>

#include "torch/c10_error.h"
#include "torch/compat.h"
#include "torch/device.h"

namespace tessera {
namespace {

bool is_nccl(c10d::ProcessGroup& group) {
  return group.getDefaultBackend()->getBackendName() == "nccl";
}

class C10dChannel final : public Channel {
 public:
  C10dChannel(c10::intrusive_ptr<c10d::ProcessGroup> group,
              c10::intrusive_ptr<c10d::ProcessGroup> reductions, std::int64_t elements,
              const at::TensorOptions& shard, const at::TensorOptions& travelling)
      : group_(std::move(group)),
        reductions_(std::move(reductions)),
        shard_(torch::zeros({elements}, shard)),
        travelling_(travelling) {}

  const at::Tensor& shard() const override { return shard_; }

  bool moves_whole() const override { return is_accelerator(travelling_.device()); }

  // Buffers live from start to finish only: a unit at rest costs its shard.
  void start_gather(Take take, bool may_change) override {
    take_ = std::move(take);
    gather_to(torch::empty({group_->getSize() * shard_.numel()}, travelling_), may_change);
  }
  bool start_gather_into(const Memory& memory, bool may_change) override {
    take_ = {};
    gather_to(memory(), may_change);
    return true;
  }

  void finish_gather() override {
    const auto take = std::exchange(take_, {});
    const auto gathered = std::exchange(gathered_, {});
    const auto sent = std::exchange(sent_, {});
    const auto gather = std::exchange(gather_, {});
    if (!gather) return;  // it has failed before
    communicate("gather of parameters", [&] { gather->wait(); });
    if (!take) return;  // they lie where they belong
    const auto count = shard_.numel();
    for (int r = 0; r < group_->getSize(); ++r) {
      take(r, 0, r == group_->getRank() ? sent : gathered.narrow(0, r * count, count));
    }
  }

  at::Tensor exchange(const at::Tensor& mine) override {
    auto sent = mine.contiguous();
    auto all = torch::empty({group_->getSize() * mine.numel()}, mine.options());
    communicate("exchange of parameters", [&] { compat::all_gather(*group_, all, sent)->wait(); });
    return all;
  }

  void start_reduce(const SliceSum& sum, Fill fill) override {
    contributed_ = torch::empty({group_->getSize() * sum.elements}, travelling_.dtype(sum.dtype));
    for (int r = 0; r < group_->getSize(); ++r)
      fill(r, 0, contributed_.narrow(0, r * sum.elements, sum.elements));
    reduce(sum);
  }
  void start_whole_reduce(const SliceSum& sum, const at::Tensor& slices) override {
    contributed_ = slices;
    reduce(sum);
  }

  at::Tensor finish_reduce() override {
    const auto contributed = std::exchange(contributed_, {});
    auto sum = std::exchange(sum_, {});
    const auto reduce = std::exchange(reduce_, {});
    if (!reduce) return {};  // it has failed before
    communicate("reduction of gradients", [&] { reduce->wait(); });
    if (averaged_ > 0) sum.narrow(0, 0, averaged_).div_(group_->getSize());
    return sum;
  }

 private:
  void gather_to(at::Tensor all, bool may_change) {
    sent_ = shard_.to(travelling_, /*non_blocking=*/shard_.is_pinned() && !may_change, may_change);
    gathered_ = std::move(all);
    gather_ = communicate("gather of parameters",
                          [&] { return compat::all_gather(*group_, gathered_, sent_); });
  }
  // NCCL divides on the way. What follows the averages is asked only whether it is zero.
  void reduce(const SliceSum& sum) {
    sum_ = torch::empty({sum.elements}, contributed_.options());
    const bool averages = sum.averaged > 0 && is_nccl(*reductions_);
    averaged_ = averages ? 0 : sum.averaged;
    c10d::ReduceScatterOptions options;
    if (averages) options.reduceOp = c10d::ReduceOp::AVG;
    reduce_ = communicate("reduction of gradients", [&] {
      return compat::reduce_scatter(*reductions_, sum_, contributed_, options);
    });
  }

  c10::intrusive_ptr<c10d::ProcessGroup> group_, reductions_;
  at::Tensor shard_;
  at::TensorOptions travelling_;
  at::Tensor sent_;         // the shard as it travels, while a gather is under way
  at::Tensor gathered_;     // the shards of all ranks, while a gather is under way
  at::Tensor contributed_;  // slices for all ranks, while a reduction is under way
  at::Tensor sum_;
  std::int64_t averaged_ = 0;  // of the sum
  Take take_;                  // while a gather is under way
  c10::intrusive_ptr<c10d::Work> gather_;
  c10::intrusive_ptr<c10d::Work> reduce_;
};

class C10dSum final : public PendingSum {
 public:
  C10dSum(c10d::ProcessGroup& group, at::Tensor values, const c10d::AllreduceOptions& options = {})
      : tensors_{std::move(values)} {
    work_ = communicate("sum of gradients", [&] { return group.allreduce(tensors_, options); });
  }
  void finish() override {
    communicate("sum of gradients", [&] { work_->wait(); });
  }

 private:
  std::vector<at::Tensor> tensors_;
  c10::intrusive_ptr<c10d::Work> work_;
};

class C10dTransport final : public Transport {
 public:
  C10dTransport(c10::intrusive_ptr<c10d::ProcessGroup> group,
                c10::intrusive_ptr<c10d::ProcessGroup> reductions)
      : group_(std::move(group)), reductions_(reductions ? std::move(reductions) : group_) {}
  std::unique_ptr<Channel> open(std::int64_t elements, const at::TensorOptions& shard,
                                const at::TensorOptions& travelling) override {
    return std::make_unique<C10dChannel>(group_, reductions_, elements, shard, travelling);
  }
  std::unique_ptr<PendingSum> start_sum(const at::Tensor& values) override {
    return std::make_unique<C10dSum>(*reductions_, values);
  }
  std::unique_ptr<PendingSum> start_mean(const at::Tensor& values) override {
    if (!is_nccl(*reductions_)) return {};
    c10d::AllreduceOptions options;
    options.reduceOp = c10d::ReduceOp::AVG;
    return std::make_unique<C10dSum>(*reductions_, values, options);
  }

 private:
  c10::intrusive_ptr<c10d::ProcessGroup> group_, reductions_;
};

class SoloChannel final : public Channel {
 public:
  SoloChannel(std::int64_t elements, const at::TensorOptions& shard,
              const at::TensorOptions& travelling)
      : shard_(torch::zeros({elements}, shard)), travelling_(travelling) {}
  const at::Tensor& shard() const override { return shard_; }
  bool moves_whole() const override { return is_accelerator(travelling_.device()); }
  bool start_gather_into(const Memory& memory, bool may_change) override {
    if (!moves_whole()) return false;
    memory().copy_(shard_, /*non_blocking=*/shard_.is_pinned() && !may_change);
    return true;
  }
  void start_whole_reduce(const SliceSum&, const at::Tensor& slices) override { sum_ = slices; }
  // Whoever takes it casts and copies.
  void start_gather(Take take, bool may_change) override {
    take_ = std::move(take);
    sent_ = may_change ? shard_.clone() : shard_;
  }
  void finish_gather() override {
    const auto sent = std::exchange(sent_, {});
    if (const auto take = std::exchange(take_, {})) take(0, 0, sent);
  }
  at::Tensor exchange(const at::Tensor& mine) override { return mine.clone(); }
  void start_reduce(const SliceSum& sum, Fill fill) override {
    sum_ = torch::empty({sum.elements}, travelling_.dtype(sum.dtype));
    fill(0, 0, sum_);
  }
  at::Tensor finish_reduce() override { return std::exchange(sum_, {}); }

 private:
  at::Tensor shard_;
  at::TensorOptions travelling_;
  at::Tensor sum_;
  Take take_;        // while a gather is under way
  at::Tensor sent_;  // likewise
};

class SoloSum final : public PendingSum {
 public:
  void finish() override {}
};

class SoloTransport final : public Transport {
 public:
  std::unique_ptr<Channel> open(std::int64_t elements, const at::TensorOptions& shard,
                                const at::TensorOptions& travelling) override {
    return std::make_unique<SoloChannel>(elements, shard, travelling);
  }
  std::unique_ptr<PendingSum> start_sum(const at::Tensor&) override {
    return std::make_unique<SoloSum>();
  }
};

}  // namespace

std::unique_ptr<Transport> make_c10d_transport(c10::intrusive_ptr<c10d::ProcessGroup> group,
                                               c10::intrusive_ptr<c10d::ProcessGroup> reductions) {
  return std::make_unique<C10dTransport>(std::move(group), std::move(reductions));
}

std::unique_ptr<Transport> make_solo_transport() {
  return std::make_unique<SoloTransport>();
}

}  // namespace tessera
