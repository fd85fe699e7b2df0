// A collective under way through shared memory.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "same_host/same_host.h"

namespace tessera {

class SameHostWork final : public c10d::Work {
 public:
  struct Options {
    c10d::OpType type;
    std::chrono::milliseconds deadline;
    std::vector<at::Tensor> outputs;
  };
  SameHostWork(std::shared_ptr<same_host::Exchange> exchange, std::uint64_t number,
               Options options);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  std::vector<at::Tensor> result() override { return outputs_; }
  void synchronize() override {}
  bool wait(std::chrono::milliseconds timeout) override;
  void abort() override { exchange_->abort(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  std::uint64_t getSequencenumber() const override { return number_; }

 private:
  void end(std::exception_ptr failure);

  const std::shared_ptr<same_host::Exchange> exchange_;
  const std::uint64_t number_;  // of the call
  const std::chrono::milliseconds deadline_;
  const std::vector<at::Tensor> outputs_;
};

// A c10d backend for ranks that share a host: collectives through shared memory.
//
// Works make progress inside calls of this rank: when the next collective starts, and in
// isCompleted and wait of any work; there is no thread behind them. getFuture waits. A deadline
// counts from the wait on. Tensors are dense, contiguous and on the CPU. After the first failure
// (Error `timeout`, `peer_failed` or `mismatch`) every later collective throws it again.

struct SameHostOptions {
  bool wanted = true;  // false: this rank does not take part
  std::chrono::milliseconds deadline{5 * 60 * 1000};
  same_host::RingSize ring = {};
  // Does what shared memory does not: point to point, all-to-all, coalesced and sparse calls,
  // reductions to one rank, by product or by bits, and those of types that same_host::can_reduce
  // refuses. Null: these throw `unsupported`.
  c10::intrusive_ptr<c10d::Backend> others = {};
};

// What the backend also is: calls that read and write where the data is, without arrays in between.
class SameHostCalls {
 public:
  virtual ~SameHostCalls() = default;
  [[nodiscard]] virtual const same_host::Exchange& exchange() const = 0;
  // The call and its work own what they use.
  [[nodiscard]] virtual c10::intrusive_ptr<c10d::Work> start(same_host::Call call,
                                                             c10d::OpType type) = 0;
};

inline constexpr const char* kSameHostName = "tessera-same-host";

// Null, on all ranks, when one does not want it or they do not all share a host; the log says why.
// Collective.
[[nodiscard]] c10::intrusive_ptr<c10d::Backend> make_same_host_backend(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    const SameHostOptions& options);

}  // namespace tessera
