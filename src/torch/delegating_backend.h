// A c10d backend whose calls go to another, for those that override some of them.
#pragma once

#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace tessera {

class DelegatingBackend : public c10d::Backend {
 public:
  // `others` may be null: then what is not overridden throws Error `unsupported`.
  DelegatingBackend(int rank, int size, c10::intrusive_ptr<c10d::Backend> others)
      : Backend(rank, size), others_(std::move(others)) {}

  using Tensors = std::vector<at::Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather_coalesced(std::vector<Tensors>& outs, Tensors& ins,
                              const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outs, Tensors& ins,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outs, std::vector<Tensors>& ins,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& in,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outs, Tensors& ins,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<std::int64_t>& out_sizes,
                        std::vector<std::int64_t>& in_sizes,
                        const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(Tensors& outs, Tensors& ins, const c10d::AllToAllOptions& options) override;
  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all) override;
  void setSequenceNumberForGroup() override;
  std::uint64_t getSequenceNumberForGroup() override;

  void setTimeout(std::chrono::milliseconds timeout) override;
  void abort() override;
  void shutdown() override;

 private:
  c10d::Backend& other(const char* operation) const;

  c10::intrusive_ptr<c10d::Backend> others_;
};

// A c10d backend for tensors on a device that no backend serves: their bytes go through the host's
// memory and a backend for the CPU.
//
// Calls look like NCCL's to whoever makes them: they are queued on a stream of the backend's own,
// after what the current stream has begun, and a work's wait() makes the current stream wait, not
// the host. But a call itself waits, for the copy to the host and for the ranks. So ranks make
// their calls in the same order, whatever the communicator.

// `cpu`: does the work. Sums and maxima, gathers, scatters of sums, and broadcasts; other calls
// throw `unsupported`.
[[nodiscard]] c10::intrusive_ptr<c10d::Backend> make_staged_backend(
    c10::intrusive_ptr<c10d::Backend> cpu, at::Device device);

}  // namespace tessera
