#include "torch/transport.h"

#include <torch/torch.h>

#include <string>
#include <utility>
#include <vector>

#include "torch/c10_error.h"

namespace tessera {
namespace {

using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

// Messages match by order among those with one tag. Gathers, reductions and sums are told apart,
// and messages of different lengths, which Gloo would not survive, never match: ranks that disagree
// wait for each other until the deadline. The high bit keeps away from tags of the user's own.
enum class Kind { gather = 0, reduction = 1, sum = 2 };
int tag_of(Kind kind, std::int64_t elements) {
  return (1 << 30) | static_cast<int>(elements % (1 << 27)) << 2 | static_cast<int>(kind);
}

// The most bytes that one rank sends for a sum as messages. Every rank gets all of every other's
// values, which is more than a ring of ranks moves; up to here what counts is how often ranks wait
// for each other.
constexpr std::int64_t kLargestMessagesOfSum = 4 << 20;

// Slices under way to and from all others.
class Messages {
 public:
  Messages(c10d::ProcessGroup& group, CallNames& names) : group_(group), names_(names) {}
  ~Messages() {
    if (works_.empty()) return;
    outgoing_.insert(outgoing_.end(), incoming_.begin(), incoming_.end());
    names_.let_end({std::move(outgoing_), std::move(works_), std::move(name_)});
  }
  Messages(const Messages&) = delete;
  Messages& operator=(const Messages&) = delete;

  // `outgoing`: a slice for each rank, all of one length and type. `incoming`: where those of the
  // others go; empty: into new memory.
  void start(const std::string& name, Kind kind, std::vector<at::Tensor> outgoing,
             std::vector<at::Tensor> incoming = {}) {
    names_.begin_held();
    const int size = group_.getSize(), rank = group_.getRank();
    outgoing_ = std::move(outgoing);
    incoming_ = std::move(incoming);
    incoming_.resize(outgoing_.size());
    for (int distance = 1; distance < size; ++distance) {
      const int from = (rank + size - distance) % size, to = (rank + distance) % size;
      const int tag = tag_of(kind, outgoing_[to].numel());
      if (!incoming_[from].defined()) incoming_[from] = torch::empty_like(outgoing_[to]);
      std::vector<at::Tensor> in{incoming_[from]}, out{outgoing_[to]};
      works_.push_back(group_.recv(in, from, tag));
      works_.push_back(group_.send(out, to, tag));
    }
    // Behind the slices on the wire: whoever is woken by the name finds them there.
    name_ = names_.start(name);
  }
  // The slices that the others sent, by rank; none in this one's place. After a failure there is
  // nothing left to wait for.
  std::vector<at::Tensor> finish() {
    const auto works = std::exchange(works_, {});
    const auto outgoing = std::exchange(outgoing_, {});
    auto incoming = std::exchange(incoming_, {});
    names_.compare(std::exchange(name_, {}));
    for (const auto& work : works) work->wait();
    return incoming;
  }

 private:
  c10d::ProcessGroup& group_;
  CallNames& names_;
  CallNames::Pending name_;
  std::vector<at::Tensor> outgoing_, incoming_;
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

// The slices by rank; `mine` in the place where nothing came.
std::vector<const std::byte*> sources_of(const std::vector<at::Tensor>& came,
                                         const at::Tensor& mine) {
  std::vector<const std::byte*> sources;
  for (const auto& slice : came) {
    sources.push_back(
        static_cast<const std::byte*>((slice.defined() ? slice : mine).const_data_ptr()));
  }
  return sources;
}

class PairwiseChannel final : public Channel {
 public:
  // `plain`: has the shard, and does what is rare.
  PairwiseChannel(GroupPtr group, std::shared_ptr<CallNames> names, std::unique_ptr<Channel> plain,
                  const at::TensorOptions& travelling)
      : group_(std::move(group)),
        names_(std::move(names)),
        plain_(std::move(plain)),
        travelling_(travelling),
        gather_(*group_, *names_),
        reduction_(*group_, *names_) {}

  const at::Tensor& shard() const override { return plain_->shard(); }
  at::Tensor exchange(const at::Tensor& mine) override {
    if (!mine.device().is_cpu()) return plain_->exchange(mine);
    const auto sent = mine.contiguous();
    const auto name = name_of("exchange", sent.numel(), sent.scalar_type());
    auto all = torch::empty({group_->getSize() * sent.numel()}, sent.options());
    std::vector<at::Tensor> parts;
    for (int r = 0; r < group_->getSize(); ++r)
      parts.push_back(all.narrow(0, r * sent.numel(), sent.numel()));
    parts[group_->getRank()].copy_(sent);
    communicate("exchange of parameters", [&] {
      Messages messages(*group_, *names_);
      messages.start(name, Kind::gather, std::vector<at::Tensor>(group_->getSize(), sent), parts);
      static_cast<void>(messages.finish());
    });
    return all;
  }

  // Buffers live from start to finish only: a unit at rest costs its shard.
  void start_gather(Take take, bool may_change) override {
    take_ = std::move(take);
    sent_ = shard().to(travelling_, /*non_blocking=*/false, may_change);
    communicate("gather of parameters", [&] {
      gather_.start(name_of("gather", sent_.numel(), sent_.scalar_type()), Kind::gather,
                    std::vector<at::Tensor>(group_->getSize(), sent_));
    });
  }

  // This rank's part is put in its place first and sent from there, so the shard may change.
  bool start_gather_into(const Memory& memory, bool /*may_change*/) override {
    const torch::NoGradGuard no_grad;
    const auto all = memory();
    std::vector<at::Tensor> parts;
    for (int r = 0; r < group_->getSize(); ++r)
      parts.push_back(all.narrow(0, r * shard().numel(), shard().numel()));
    const auto own = parts[group_->getRank()];
    own.copy_(shard());
    communicate("gather of parameters", [&] {
      gather_.start(name_of("gather", own.numel(), own.scalar_type()), Kind::gather,
                    std::vector<at::Tensor>(group_->getSize(), own), std::move(parts));
    });
    gathers_into_ = true;
    return true;
  }

  void finish_gather() override {
    const auto take = std::exchange(take_, {});
    const bool into = std::exchange(gathers_into_, false);
    if (!take && !into) return;  // it has failed before
    auto shards = communicate("gather of parameters", [&] { return gather_.finish(); });
    if (into) return;
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
    communicate("reduction of gradients", [&] {
      reduction_.start(name_of("reduction", sum.elements, sum.dtype, sum.what), Kind::reduction,
                       std::move(slices));
    });
  }

  at::Tensor finish_reduce() override {
    if (!summable(what_.dtype)) return plain_->finish_reduce();
    auto sum = std::exchange(sum_, {});
    if (!sum.defined()) return sum;  // it has failed before
    const auto slices = communicate("reduction of gradients", [&] { return reduction_.finish(); });
    add_up(what_, 0, sources_of(slices, sum), sum);
    divide_rest(what_, group_->getSize(), sum);
    return sum;
  }

 private:
  GroupPtr group_;
  std::shared_ptr<CallNames> names_;  // of the transport: all channels' operations have one order
  std::unique_ptr<Channel> plain_;
  at::TensorOptions travelling_;
  Take take_;                  // while a gather is under way
  at::Tensor sent_;            // the shard as it travels, likewise
  bool gathers_into_ = false;  // while a gather is under way that nobody takes
  Messages gather_;
  SliceSum what_;   // of the last reduction
  at::Tensor sum_;  // this rank's own slice, while a reduction is under way
  Messages reduction_;
};

std::string name_of_sum(const at::Tensor& values) {
  return "sum of " + std::to_string(values.numel()) + " " + c10::toString(values.scalar_type());
}

// Sends all values to all ranks, and each adds up in the order of ranks: the same bits everywhere.
class MessagesSum final : public PendingSum {
 public:
  MessagesSum(GroupPtr group, std::shared_ptr<CallNames> names, const at::Tensor& values)
      : group_(std::move(group)),
        names_(std::move(names)),
        values_(values),
        messages_(*group_, *names_) {
    communicate("sum of gradients", [&] {
      messages_.start(name_of_sum(values_), Kind::sum,
                      std::vector<at::Tensor>(group_->getSize(), values_));
    });
  }
  // Others may still read the values while these are here, so they change when all were sent.
  void finish() override {
    const auto theirs = communicate("sum of gradients", [&] { return messages_.finish(); });
    const SliceSum sum{.elements = values_.numel(), .dtype = values_.scalar_type()};
    add_up(sum, 0, sources_of(theirs, values_), values_);
  }

  static bool fits(const c10d::ProcessGroup& group, const at::Tensor& values) {
    return values.device().is_cpu() && summable(values.scalar_type()) &&
           static_cast<std::int64_t>(values.nbytes()) * (group.getSize() - 1) <=
               kLargestMessagesOfSum;
  }

 private:
  GroupPtr group_;
  std::shared_ptr<CallNames> names_;
  at::Tensor values_;
  Messages messages_;
};

// A sum by the group's own collective, which wants to know first that all ranks sum the same.
class NamedSum final : public PendingSum {
 public:
  NamedSum(std::shared_ptr<CallNames> names, Transport& plain, const at::Tensor& values)
      : names_(std::move(names)) {
    communicate("sum of gradients", [&] {
      names_->start_before(name_of_sum(values),
                           [sum = sum_, &plain, values] { *sum = plain.start_sum(values); });
    });
  }
  void finish() override {
    communicate("sum of gradients", [&] { names_->begin_held(); });
    (*sum_)->finish();
  }

 private:
  std::shared_ptr<CallNames> names_;
  // Empty until the ranks are known to sum the same, which is when the names have nothing held.
  std::shared_ptr<std::unique_ptr<PendingSum>> sum_ =
      std::make_shared<std::unique_ptr<PendingSum>>();
};

class PairwiseTransport final : public Transport {
 public:
  PairwiseTransport(GroupPtr group, std::shared_ptr<CallNames> names)
      : group_(std::move(group)), names_(std::move(names)), plain_(make_c10d_transport(group_)) {}

  std::unique_ptr<Channel> open(std::int64_t elements, const at::TensorOptions& shard,
                                const at::TensorOptions& travelling) override {
    auto plain = plain_->open(elements, shard, travelling);
    if (!travelling.device().is_cpu()) return plain;
    return std::make_unique<PairwiseChannel>(group_, names_, std::move(plain), travelling);
  }
  std::unique_ptr<PendingSum> start_sum(const at::Tensor& values) override {
    if (MessagesSum::fits(*group_, values))
      return std::make_unique<MessagesSum>(group_, names_, values);
    return std::make_unique<NamedSum>(names_, *plain_, values);
  }

 private:
  GroupPtr group_;
  std::shared_ptr<CallNames> names_;
  std::unique_ptr<Transport> plain_;
};

}  // namespace

std::unique_ptr<Transport> make_pairwise_transport(GroupPtr group,
                                                   std::shared_ptr<CallNames> names) {
  if (!names) return {};
  return std::make_unique<PairwiseTransport>(std::move(group), std::move(names));
}

}  // namespace tessera
