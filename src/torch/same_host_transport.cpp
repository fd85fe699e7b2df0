#include "torch/transport.h"

#include <torch/torch.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "same_host/same_host.h"
#include "torch/c10_error.h"
#include "torch/same_host_backend.h"
#include "torch/tensor.h"

namespace tessera {
namespace {

using same_host::Call;
using same_host::Reduction;
using same_host::Slices;
using Slots = std::span<const std::byte* const>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

std::string name_of(const char* operation, std::int64_t elements, at::ScalarType type) {
  return operation + std::string(" of ") + std::to_string(elements) + " " + c10::toString(type);
}

std::int64_t elements_in(std::size_t bytes, at::ScalarType type) {
  return static_cast<std::int64_t>(bytes / c10::elementSize(type));
}

// A slot as a tensor; what only reads it does not write.
at::Tensor tensor_at(const std::byte* memory, std::size_t bytes, at::ScalarType type) {
  return at::from_blob(const_cast<std::byte*>(memory), {elements_in(bytes, type)},
                       at::TensorOptions().dtype(type));
}

// data[i] = what the others have at `offset` of their slots and data[i], in the order of ranks.
void reduce_in_place(DType dtype, Reduction reduction, Slots slots, std::size_t offset, int own,
                     std::span<std::byte> data) {
  c10::SmallVector<const std::byte*, 8> sources;
  for (const auto* slot : slots) sources.push_back(slot + offset);
  sources[own] = data.data();
  same_host::reduce(dtype, reduction, {sources.data(), sources.size()}, data.data(),
                    data.size() / size_of(dtype));
}

class SameHostChannel final : public Channel {
 public:
  // `plain`: has the shard, and does what is rare.
  SameHostChannel(SameHostCalls& calls, std::unique_ptr<Channel> plain, at::ScalarType travelling)
      : calls_(calls), plain_(std::move(plain)), travelling_(travelling) {}
  // Rounds that are still queued go on without whoever took.
  ~SameHostChannel() override {
    if (taker_) *taker_ = {};
  }

  const at::Tensor& shard() const override { return plain_->shard(); }
  at::Tensor exchange(const at::Tensor& mine) override;

  void start_gather(Take take, bool may_change) override;
  void finish_gather() override {
    const auto gather = std::exchange(gather_, {});
    const auto taker = std::exchange(taker_, {});
    // After a failure there is nothing left to wait for.
    if (gather) communicate("gather of parameters", [&] { gather->wait(); });
  }

  void start_reduce(const SliceSum& sum, Fill fill) override;
  at::Tensor finish_reduce() override;

 private:
  SameHostCalls& calls_;
  std::unique_ptr<Channel> plain_;
  at::ScalarType travelling_;
  std::shared_ptr<Take> taker_;  // while a gather is under way
  // The sum of a reduction under way; memory from its first part on.
  std::shared_ptr<at::Tensor> sum_;
  SliceSum what_;  // of the last reduction
  WorkPtr gather_, reduce_;
};

at::Tensor SameHostChannel::exchange(const at::Tensor& mine) {
  if (!mine.device().is_cpu()) return plain_->exchange(mine);
  const auto sent = mine.contiguous();
  const auto& exchange = calls_.exchange();
  auto all = torch::empty({exchange.size() * sent.numel()}, sent.options());
  std::vector<std::byte*> outs;
  for (int r = 0; r < exchange.size(); ++r)
    outs.push_back(static_cast<std::byte*>(all.mutable_data_ptr()) + r * sent.nbytes());
  auto call = same_host::gather_call(exchange,
                                     Channel::name_of("exchange", sent.numel(), sent.scalar_type()),
                                     {static_cast<const std::byte*>(sent.const_data_ptr()),
                                      std::move(outs), sent.nbytes(), same_host::kEveryone});
  communicate("exchange of parameters",
              [&] { calls_.start(std::move(call), c10d::OpType::_ALLGATHER_BASE)->wait(); });
  return all;
}

void SameHostChannel::start_gather(Take take, bool may_change) {
  const auto sent = shard().to(travelling_, /*non_blocking=*/false, may_change);
  const auto& exchange = calls_.exchange();
  const auto slices = same_host::whole_slots(exchange, sent.nbytes());
  taker_ = std::make_shared<Take>(std::move(take));
  Call call{.name = Channel::name_of("gather", sent.numel(), travelling_),
            .rounds = slices.rounds()};
  call.put = [slices, sent](std::int64_t round, std::byte* slot) {
    const auto bytes = slices.size(round);
    if (bytes == 0) return;
    std::memcpy(slot, static_cast<const std::byte*>(sent.const_data_ptr()) + slices.begin(round),
                bytes);
  };
  call.take = [slices, sent, own = exchange.rank(), taker = taker_](std::int64_t round,
                                                                    Slots slots) {
    if (!*taker) return;
    const auto type = sent.scalar_type();
    const auto begin = elements_in(slices.begin(round), type);
    const auto count = elements_in(slices.size(round), type);
    for (int r = 0; r < static_cast<int>(slots.size()); ++r) {
      (*taker)(
          r, begin,
          r == own ? sent.narrow(0, begin, count) : tensor_at(slots[r], slices.size(round), type));
    }
  };
  gather_ = communicate("gather of parameters", [&] {
    return calls_.start(std::move(call), c10d::OpType::_ALLGATHER_BASE);
  });
}

void SameHostChannel::start_reduce(const SliceSum& sum, Fill fill) {
  what_ = sum;
  if (!summable(sum.dtype)) return plain_->start_reduce(sum, std::move(fill));
  const auto& exchange = calls_.exchange();
  const auto slices = same_host::shared_slots(
      exchange, static_cast<std::size_t>(sum.elements) * c10::elementSize(sum.dtype));
  sum_ = std::make_shared<at::Tensor>();
  Call call{.name = Channel::name_of("reduction", sum.elements, sum.dtype, sum.what),
            .rounds = slices.rounds()};
  const int own = exchange.rank(), ranks = exchange.size();
  call.put = [=](std::int64_t round, std::byte* slot) {
    const auto bytes = slices.size(round);
    const auto begin = elements_in(slices.begin(round), sum.dtype);
    for (int r = 0; r < ranks; ++r) {
      if (r != own) fill(r, begin, tensor_at(slot + r * slices.most, bytes, sum.dtype));
    }
  };
  call.take = [=, out = sum_](std::int64_t round, Slots slots) {
    const torch::NoGradGuard no_grad;
    if (!out->defined()) *out = torch::empty({sum.elements}, sum.dtype);
    const auto begin = elements_in(slices.begin(round), sum.dtype);
    const auto part = out->narrow(0, begin, elements_in(slices.size(round), sum.dtype));
    fill(own, begin, part);
    std::vector<const std::byte*> sources;
    for (const auto* slot : slots) sources.push_back(slot + own * slices.most);
    sources[own] = static_cast<const std::byte*>(part.const_data_ptr());
    add_up(sum, begin, std::move(sources), part);
  };
  reduce_ = communicate("reduction of gradients", [&] {
    return calls_.start(std::move(call), c10d::OpType::_REDUCE_SCATTER_BASE);
  });
}

at::Tensor SameHostChannel::finish_reduce() {
  if (!summable(what_.dtype)) return plain_->finish_reduce();
  const auto reduce = std::exchange(reduce_, {});
  const auto place = std::exchange(sum_, {});
  if (!reduce) return {};  // it has failed before
  communicate("reduction of gradients", [&] { reduce->wait(); });
  auto sum = std::move(*place);
  divide_rest(what_, calls_.exchange().size(), sum);
  return sum;
}

// Arrays that lie end to end in no memory.
class Parts {
 public:
  Parts(std::vector<at::Tensor> averaged, at::Tensor flags) : tensors_(std::move(averaged)) {
    flags_ = tensors_.size();
    tensors_.push_back(std::move(flags));
    for (const auto& tensor : tensors_) ends_.push_back(bytes() + tensor.nbytes());
  }

  [[nodiscard]] std::size_t bytes() const { return ends_.empty() ? 0 : ends_.back(); }
  // visit(memory, bytes, offset behind `begin`, whether it is of the flags) of what lies in
  // [begin, begin + size).
  template <typename Visit>
  void visit(std::size_t begin, std::size_t size, const Visit& visit) const {
    const auto end = begin + size;
    auto i = static_cast<std::size_t>(std::ranges::upper_bound(ends_, begin) - ends_.begin());
    for (; i < tensors_.size(); ++i) {
      const auto start = ends_[i] - tensors_[i].nbytes();
      if (start >= end) return;
      const auto first = std::max(begin, start), last = std::min(end, ends_[i]);
      if (first == last) continue;
      auto* memory = static_cast<std::byte*>(tensors_[i].mutable_data_ptr()) + (first - start);
      visit(memory, last - first, first - begin, i == flags_);
    }
  }

 private:
  std::vector<at::Tensor> tensors_;
  std::vector<std::size_t> ends_;
  std::size_t flags_;
};

class SameHostSum final : public PendingSum {
 public:
  SameHostSum(SameHostCalls& calls, const std::vector<at::Tensor>& averaged,
              const at::Tensor& flags) {
    const auto type = flags.scalar_type();
    const auto parts = std::make_shared<const Parts>(averaged, flags);
    const auto& exchange = calls.exchange();
    const auto slices = same_host::whole_slots(exchange, parts->bytes());
    // The name that the backend gives an all-reduce of one array.
    Call call{.name = name_of("all_reduce by sum", elements_in(parts->bytes(), type), type),
              .rounds = slices.rounds()};
    call.put = [=](std::int64_t round, std::byte* slot) {
      parts->visit(slices.begin(round), slices.size(round),
                   [&](const std::byte* memory, std::size_t bytes, std::size_t offset, bool) {
                     std::memcpy(slot + offset, memory, bytes);
                   });
    };
    call.take = [=, dtype = dtype_of(type), own = exchange.rank()](std::int64_t round,
                                                                   Slots slots) {
      parts->visit(slices.begin(round), slices.size(round),
                   [&](std::byte* memory, std::size_t bytes, std::size_t offset, bool is_flags) {
                     reduce_in_place(dtype, is_flags ? Reduction::sum : Reduction::average, slots,
                                     offset, own, {memory, bytes});
                   });
    };
    work_ = communicate("sum of gradients",
                        [&] { return calls.start(std::move(call), c10d::OpType::ALLREDUCE); });
  }
  void finish() override {
    communicate("sum of gradients", [&] { work_->wait(); });
  }

 private:
  WorkPtr work_;
};

class SameHostTransport final : public Transport {
 public:
  SameHostTransport(c10::intrusive_ptr<c10d::ProcessGroup> group, SameHostCalls& calls)
      : plain_(make_c10d_transport(std::move(group))), calls_(calls) {}

  std::unique_ptr<Channel> open(std::int64_t elements, const at::TensorOptions& shard,
                                const at::TensorOptions& travelling) override {
    auto plain = plain_->open(elements, shard, travelling);
    if (!shard.device().is_cpu() || !travelling.device().is_cpu()) return plain;
    return std::make_unique<SameHostChannel>(calls_, std::move(plain),
                                             c10::typeMetaToScalarType(travelling.dtype()));
  }
  std::unique_ptr<PendingSum> start_sum(const at::Tensor& values) override {
    return plain_->start_sum(values);
  }
  std::unique_ptr<PendingSum> start_average(const std::vector<at::Tensor>& parts,
                                            const at::Tensor& flags) override {
    return std::make_unique<SameHostSum>(calls_, parts, flags);
  }

 private:
  std::unique_ptr<Transport> plain_;  // holds the group, and with it `calls_`
  SameHostCalls& calls_;
};

}  // namespace

std::unique_ptr<Transport> make_same_host_transport(c10::intrusive_ptr<c10d::ProcessGroup> group) {
  const auto backend = group->getDefaultBackend();
  auto* calls = dynamic_cast<SameHostCalls*>(backend.get());
  if (calls == nullptr) return {};
  return std::make_unique<SameHostTransport>(std::move(group), *calls);
}

}  // namespace tessera
