#include "torch/same_host_backend.h"

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/List.h>
#include <ATen/core/ivalue.h>
#include <torch/types.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "base/log.h"
#include "base/process.h"
#include "same_host/same_host.h"
#include "tessera/error.h"
#include "torch/c10_error.h"
#include "torch/delegating_backend.h"
#include "torch/tensor.h"

namespace tessera {

SameHostWork::SameHostWork(std::shared_ptr<same_host::Exchange> exchange, std::uint64_t number,
                           Options options)
    : Work(exchange->rank(), options.type),
      exchange_(std::move(exchange)),
      number_(number),
      deadline_(options.deadline),
      outputs_(std::move(options.outputs)) {}

bool SameHostWork::isCompleted() {
  {
    const std::lock_guard lock(mutex_);
    if (completed_) return true;
  }
  try {
    if (!exchange_->done(number_)) return false;
    end(nullptr);
  } catch (...) {
    end(std::current_exception());
  }
  return true;
}

bool SameHostWork::isSuccess() const {
  const std::lock_guard lock(mutex_);
  return completed_ && !exception_;
}

std::exception_ptr SameHostWork::exception() const {
  const std::lock_guard lock(mutex_);
  return exception_;
}

bool SameHostWork::wait(std::chrono::milliseconds timeout) {
  try {
    exchange_->wait(number_, timeout == kNoTimeout ? deadline_ : timeout);
    end(nullptr);
  } catch (...) {
    end(std::current_exception());
    throw;
  }
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> SameHostWork::getFuture() {
  auto future =
      c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  try {
    wait(kNoTimeout);
    future->markCompleted(c10::IValue(outputs_));
  } catch (...) {
    future->setError(std::current_exception());
  }
  return future;
}

// Not Work::finish: it would throw what it is given a second time around.
void SameHostWork::end(std::exception_ptr failure) {
  const std::lock_guard lock(mutex_);
  completed_ = true;
  exception_ = std::move(failure);
}

namespace {

using same_host::Call;
using same_host::Exchange;
using same_host::Reduction;
using std::chrono::milliseconds;
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

std::byte* bytes_of(const at::Tensor& tensor) {
  return static_cast<std::byte*>(tensor.mutable_data_ptr());
}
const std::byte* const_bytes_of(const at::Tensor& tensor) {
  return static_cast<const std::byte*>(tensor.const_data_ptr());
}

// "all_gather of 12 Float"
std::string name_of(const std::string& operation, const at::Tensor& tensor) {
  return operation + " of " + std::to_string(tensor.numel()) + " " +
         c10::toString(tensor.scalar_type());
}

[[noreturn]] void refuse(const char* operation, const std::string& reason) {
  throw Error(ErrorCode::invalid_argument, reason).while_doing(operation);
}

void require_plain(const char* operation, const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.device().is_cpu() || tensor.layout() != at::kStrided ||
      !tensor.is_contiguous()) {
    refuse(operation, "tensors must be dense and contiguous, on the CPU");
  }
}

// `tensor` is one of `elements` elements and the type of `like`.
void require_like(const char* operation, const at::Tensor& tensor, const at::Tensor& like,
                  std::int64_t elements) {
  require_plain(operation, tensor);
  if (tensor.scalar_type() != like.scalar_type() || tensor.numel() != elements) {
    refuse(operation, "expected a tensor of " + std::to_string(elements) + " " +
                          c10::toString(like.scalar_type()) + ", found " +
                          std::to_string(tensor.numel()) + " " +
                          c10::toString(tensor.scalar_type()));
  }
}

const at::Tensor& only(const char* operation, const Tensors& tensors) {
  if (tensors.size() != 1) {
    refuse(operation, "expected one tensor, found " + std::to_string(tensors.size()));
  }
  return tensors.front();
}

// One list, for each rank a tensor; none where nothing is to be had.
bool fits(const std::vector<Tensors>& lists, bool here, int size) {
  if (!here) return lists.empty();
  return lists.size() == 1 && lists.front().size() == static_cast<std::size_t>(size);
}

// Refuses lists that are not of tensors like `like`.
void require_list(const char* operation, const std::vector<Tensors>& lists, bool here,
                  const at::Tensor& like, int size) {
  if (!fits(lists, here, size)) {
    refuse(operation, here ? "expected one list of a tensor for each rank"
                           : "only the root has a list of tensors");
  }
  for (const auto& list : lists) {
    for (const auto& tensor : list) require_like(operation, tensor, like, like.numel());
  }
}

// A reduction that shared memory can do.
struct Reducing {
  DType dtype;
  Reduction reduction;
  const char* name;
};
struct KnownReduction {
  c10d::ReduceOp::RedOpType op;
  Reduction reduction;
  const char* name;
};
constexpr std::array<KnownReduction, 4> kReductions{
    {{c10d::ReduceOp::SUM, Reduction::sum, "sum"},
     {c10d::ReduceOp::AVG, Reduction::average, "average"},
     {c10d::ReduceOp::MIN, Reduction::minimum, "minimum"},
     {c10d::ReduceOp::MAX, Reduction::maximum, "maximum"}}};

std::optional<DType> known_dtype(at::ScalarType type) {
  try {
    return dtype_of(type);
  } catch (const Error&) {
    return std::nullopt;  // a type that the core does not know
  }
}

std::optional<Reducing> reducing_of(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  const auto* known = std::ranges::find(kReductions, static_cast<c10d::ReduceOp::RedOpType>(op),
                                        &KnownReduction::op);
  const auto dtype = known_dtype(tensor.scalar_type());
  if (known == kReductions.end() || !dtype) return std::nullopt;
  if (!same_host::can_reduce(*dtype, known->reduction)) return std::nullopt;
  return Reducing{*dtype, known->reduction, known->name};
}

class SameHostBackend final : public DelegatingBackend, public SameHostCalls {
 public:
  SameHostBackend(std::unique_ptr<Exchange> exchange, const SameHostOptions& options)
      : DelegatingBackend(exchange->rank(), exchange->size(), options.others),
        exchange_(std::move(exchange)),
        deadline_(options.deadline) {}

  const std::string getBackendName() const override { return kSameHostName; }

  void setTimeout(milliseconds timeout) override {
    deadline_ = timeout;
    DelegatingBackend::setTimeout(timeout);
  }
  void abort() override {
    exchange_->abort();
    DelegatingBackend::abort();
  }

  const Exchange& exchange() const override { return *exchange_; }
  WorkPtr start(Call call, c10d::OpType type) override {
    return start(std::move(call), {}, {type, c10d::kUnsetTimeout, {}});
  }

  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return start(same_host::barrier_call(), {}, {c10d::OpType::BARRIER, options.timeout, {}});
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    const auto& tensor = only("broadcast", tensors);
    require_plain("broadcast", tensor);
    const int root = root_of("broadcast", options.rootRank);
    return start(same_host::broadcast_call(
                     *exchange_, name_of("broadcast from " + std::to_string(root), tensor),
                     {bytes_of(tensor), tensor.nbytes(), root}),
                 tensors, {c10d::OpType::BROADCAST, options.timeout, tensors});
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    const auto& tensor = only("all_reduce", tensors);
    const auto reducing = reducing_of(tensor, options.reduceOp);
    if (!reducing) return DelegatingBackend::allreduce(tensors, options);
    require_plain("all_reduce", tensor);
    auto* data = bytes_of(tensor);
    return start(
        same_host::all_reduce_call(
            *exchange_, name_of(std::string("all_reduce by ") + reducing->name, tensor), data,
            {reducing->dtype, reducing->reduction, data, static_cast<std::size_t>(tensor.numel())}),
        tensors, {c10d::OpType::ALLREDUCE, options.timeout, tensors});
  }

  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in,
                          const c10d::AllgatherOptions& options) override {
    require_plain("all_gather", in);
    require_like("all_gather", out, in, in.numel() * size_);
    std::vector<std::byte*> outs;
    for (int r = 0; r < size_; ++r) outs.push_back(bytes_of(out) + r * in.nbytes());
    return start(same_host::gather_call(
                     *exchange_, name_of("all_gather", in),
                     {const_bytes_of(in), std::move(outs), in.nbytes(), same_host::kEveryone}),
                 {in, out}, {c10d::OpType::_ALLGATHER_BASE, options.timeout, {out}});
  }

  WorkPtr allgather(std::vector<Tensors>& outs, Tensors& ins,
                    const c10d::AllgatherOptions& options) override {
    return gather_list("all_gather", outs, ins, same_host::kEveryone,
                       {c10d::OpType::ALLGATHER, options.timeout, {}});
  }

  WorkPtr gather(std::vector<Tensors>& outs, Tensors& ins,
                 const c10d::GatherOptions& options) override {
    return gather_list("gather", outs, ins, root_of("gather", options.rootRank),
                       {c10d::OpType::GATHER, options.timeout, {}});
  }

  WorkPtr scatter(Tensors& outs, std::vector<Tensors>& ins,
                  const c10d::ScatterOptions& options) override {
    const auto& out = only("scatter", outs);
    require_plain("scatter", out);
    const int root = root_of("scatter", options.rootRank);
    require_list("scatter", ins, rank_ == root, out, size_);
    Tensors used{out};
    std::vector<const std::byte*> from;
    for (const auto& list : ins) {
      for (const auto& in : list) from.push_back(const_bytes_of(in));
      used.insert(used.end(), list.begin(), list.end());
    }
    return start(
        same_host::scatter_call(*exchange_, name_of("scatter from " + std::to_string(root), out),
                                {std::move(from), bytes_of(out), out.nbytes(), root}),
        std::move(used), {c10d::OpType::SCATTER, options.timeout, outs});
  }

  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& in,
                               const c10d::ReduceScatterOptions& options) override {
    const auto reducing = reducing_of(in, options.reduceOp);
    if (!reducing) return DelegatingBackend::_reduce_scatter_base(out, in, options);
    require_plain("reduce_scatter", out);
    require_like("reduce_scatter", in, out, out.numel() * size_);
    std::vector<const std::byte*> ins;
    for (int r = 0; r < size_; ++r) ins.push_back(const_bytes_of(in) + r * out.nbytes());
    return start(same_host::reduce_scatter_call(
                     *exchange_, name_of(std::string("reduce_scatter by ") + reducing->name, out),
                     std::move(ins),
                     {reducing->dtype, reducing->reduction, bytes_of(out),
                      static_cast<std::size_t>(out.numel())}),
                 {in, out}, {c10d::OpType::_REDUCE_SCATTER_BASE, options.timeout, {out}});
  }

 private:
  int root_of(const char* operation, std::int64_t root) const {
    if (root < 0 || root >= size_) refuse(operation, "no rank " + std::to_string(root));
    return static_cast<int>(root);
  }

  WorkPtr gather_list(const char* operation, const std::vector<Tensors>& outs, const Tensors& ins,
                      int root, SameHostWork::Options options) {
    const auto& in = only(operation, ins);
    require_plain(operation, in);
    require_list(operation, outs, root == same_host::kEveryone || root == rank_, in, size_);
    Tensors used{in};
    std::vector<std::byte*> to;
    for (const auto& list : outs) {
      for (const auto& out : list) to.push_back(bytes_of(out));
      used.insert(used.end(), list.begin(), list.end());
      options.outputs = list;
    }
    const auto where = root == same_host::kEveryone ? "" : " to " + std::to_string(root);
    return start(same_host::gather_call(*exchange_, name_of(operation + where, in),
                                        {const_bytes_of(in), std::move(to), in.nbytes(), root}),
                 std::move(used), std::move(options));
  }

  // `used`: what the call reads and writes.
  WorkPtr start(Call call, Tensors used, SameHostWork::Options options) {
    require_own_connections(made_);
    call.owner = std::make_shared<const Tensors>(std::move(used));
    if (options.deadline == c10d::kUnsetTimeout) options.deadline = deadline_;
    const auto number = exchange_->start(std::move(call));
    return c10::make_intrusive<SameHostWork>(exchange_, number, std::move(options));
  }

  const std::shared_ptr<Exchange> exchange_;  // works hold it too
  milliseconds deadline_;
  MadeHere made_;
};

class StoreBoard final : public same_host::Board {
 public:
  explicit StoreBoard(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}
  void post(const std::string& key, const std::string& text) override { store_->set(key, text); }
  std::optional<std::string> read(const std::string& key) override {
    if (!store_->check({key})) return std::nullopt;
    return store_->get_to_str(key);
  }

 private:
  c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_same_host_backend(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    const SameHostOptions& options) {
  StoreBoard board(store);
  auto meeting = same_host::meet(
      board, rank, size,
      {.wanted = options.wanted, .deadline = options.deadline, .ring = options.ring});
  if (!meeting.exchange) {
    log(LogLevel::info, "collectives do not go through shared memory: " + meeting.reason);
    return {};
  }
  return c10::make_intrusive<SameHostBackend>(std::move(meeting.exchange), options);
}

}  // namespace tessera
