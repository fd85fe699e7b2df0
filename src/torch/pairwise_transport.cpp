#include "torch/pairwise_transport.h"

#include <torch/torch.h>

#include <utility>
#include <vector>

#include "torch/c10_error.h"
#include "torch/c10d_transport.h"
#include "torch/slice_sums.h"

namespace tessera {
namespace {

using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

// Messages match by order among those with one tag. Gathers and reductions are told apart, and
// messages of different lengths, which Gloo would not survive, never match: ranks that disagree
// wait for each other until the deadline. The high bit keeps away from tags of the user's own.
enum class Kind { gather, reduction };
int tag_of(Kind kind, std::int64_t elements) {
  return (1 << 30) | static_cast<int>(elements % (1 << 28)) << 1 | (kind == Kind::gather ? 0 : 1);
}

// Slices under way to and from all others.
class Messages {
 public:
  // `outgoing`: a slice for each rank, all of one length and type.
  void start(c10d::ProcessGroup& group, Kind kind, std::vector<at::Tensor> outgoing) {
    const int size = group.getSize(), rank = group.getRank();
    outgoing_ = std::move(outgoing);
    incoming_ = std::vector<at::Tensor>(outgoing_.size());
    for (int distance = 1; distance < size; ++distance) {
      const int from = (rank + size - distance) % size, to = (rank + distance) % size;
      const int tag = tag_of(kind, outgoing_[to].numel());
      incoming_[from] = torch::empty_like(outgoing_[to]);
      std::vector<at::Tensor> in{incoming_[from]}, out{outgoing_[to]};
      works_.push_back(group.recv(in, from, tag));
      works_.push_back(group.send(out, to, tag));
    }
  }
  // What the others sent, by rank; nothing in this one's place.
  std::vector<at::Tensor> finish() {
    for (const auto& work : std::exchange(works_, {})) work->wait();
    outgoing_.clear();
    return std::exchange(incoming_, {});
  }

 private:
  std::vector<at::Tensor> outgoing_, incoming_;
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

class PairwiseChannel final : public Channel {
 public:
  // `plain`: has the shard, and does what is rare.
  PairwiseChannel(GroupPtr group, std::unique_ptr<Channel> plain,
                  const at::TensorOptions& travelling)
      : group_(std::move(group)), plain_(std::move(plain)), travelling_(travelling) {}

  const at::Tensor& shard() const override { return plain_->shard(); }
  at::Tensor exchange(const at::Tensor& mine) override { return plain_->exchange(mine); }

  // Buffers live from start to finish only: a unit at rest costs its shard.
  void start_gather(Take take) override {
    take_ = std::move(take);
    sent_ = shard().to(travelling_);
    communicate("gather of parameters", [&] {
      gather_.start(*group_, Kind::gather, std::vector<at::Tensor>(group_->getSize(), sent_));
    });
  }

  void finish_gather() override {
    const auto take = std::exchange(take_, {});
    auto shards = communicate("gather of parameters", [&] { return gather_.finish(); });
    shards[group_->getRank()] = std::exchange(sent_, {});
    for (int r = 0; r < group_->getSize(); ++r) take(r, 0, std::exchange(shards[r], {}));
  }

  void start_reduce(const SliceSum& sum, Fill fill) override {
    what_ = sum;
    if (!summable(sum.dtype)) return plain_->start_reduce(sum, std::move(fill));
    std::vector<at::Tensor> slices;
    for (int r = 0; r < group_->getSize(); ++r) {
      slices.push_back(torch::empty({sum.elements}, travelling_.dtype(sum.dtype)));
      fill(r, 0, slices.back());
    }
    sum_ = slices[group_->getRank()];
    communicate("reduction of gradients",
                [&] { reduction_.start(*group_, Kind::reduction, std::move(slices)); });
  }

  at::Tensor finish_reduce() override {
    if (!sum_.defined()) return plain_->finish_reduce();
    auto sum = std::exchange(sum_, {});
    const auto slices = communicate("reduction of gradients", [&] { return reduction_.finish(); });
    std::vector<const std::byte*> sources;
    for (const auto& slice : slices) {
      sources.push_back(
          static_cast<const std::byte*>((slice.defined() ? slice : sum).const_data_ptr()));
    }
    add_up(what_, 0, std::move(sources), sum);
    divide_rest(what_, group_->getSize(), sum);
    return sum;
  }

 private:
  GroupPtr group_;
  std::unique_ptr<Channel> plain_;
  at::TensorOptions travelling_;
  Take take_;        // while a gather is under way
  at::Tensor sent_;  // the shard as it travels, likewise
  Messages gather_;
  SliceSum what_;   // of the last reduction
  at::Tensor sum_;  // this rank's own slice, while a reduction is under way
  Messages reduction_;
};

class PairwiseTransport final : public Transport {
 public:
  explicit PairwiseTransport(GroupPtr group)
      : group_(std::move(group)), plain_(make_c10d_transport(group_)) {}

  std::unique_ptr<Channel> open(std::int64_t elements, const at::TensorOptions& shard,
                                const at::TensorOptions& travelling) override {
    auto plain = plain_->open(elements, shard, travelling);
    if (!travelling.device().is_cpu()) return plain;
    return std::make_unique<PairwiseChannel>(group_, std::move(plain), travelling);
  }
  std::unique_ptr<PendingSum> start_sum(const at::Tensor& values) override {
    return plain_->start_sum(values);
  }

 private:
  GroupPtr group_;
  std::unique_ptr<Transport> plain_;
};

}  // namespace

std::unique_ptr<Transport> make_pairwise_transport(GroupPtr group) {
  if (group->getDefaultBackend()->getBackendName() != "gloo") return {};
  return std::make_unique<PairwiseTransport>(std::move(group));
}

}  // namespace tessera
