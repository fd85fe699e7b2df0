#include "torch/delegating_backend.h"

#include <string>
#include <utility>
#include <vector>

#include <c10/core/StreamGuard.h>
#include <torch/torch.h>

#include "tessera/error.h"
#include "torch/device.h"

namespace tessera {

using WorkPtr = DelegatingBackend::WorkPtr;

c10d::Backend& DelegatingBackend::other(const char* operation) const {
  if (!others_) {
    throw Error(ErrorCode::unsupported, std::string(operation) + " with these arguments is not " +
                                            "supported by backend " + getBackendName());
  }
  return *others_;
}

WorkPtr DelegatingBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return other("allreduce").allreduce(tensors, options);
}
WorkPtr DelegatingBackend::allreduce_sparse(Tensors& tensors,
                                            const c10d::AllreduceOptions& options) {
  return other("allreduce_sparse").allreduce_sparse(tensors, options);
}
WorkPtr DelegatingBackend::allreduce_coalesced(Tensors& tensors,
                                               const c10d::AllreduceCoalescedOptions& options) {
  return other("allreduce_coalesced").allreduce_coalesced(tensors, options);
}
WorkPtr DelegatingBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return other("reduce").reduce(tensors, options);
}
WorkPtr DelegatingBackend::allgather_coalesced(std::vector<Tensors>& outs, Tensors& ins,
                                               const c10d::AllgatherOptions& options) {
  return other("allgather_coalesced").allgather_coalesced(outs, ins, options);
}
WorkPtr DelegatingBackend::allgather_into_tensor_coalesced(Tensors& outs, Tensors& ins,
                                                           const c10d::AllgatherOptions& options) {
  return other("allgather_into_tensor_coalesced")
      .allgather_into_tensor_coalesced(outs, ins, options);
}
WorkPtr DelegatingBackend::reduce_scatter(Tensors& outs, std::vector<Tensors>& ins,
                                          const c10d::ReduceScatterOptions& options) {
  return other("reduce_scatter").reduce_scatter(outs, ins, options);
}
WorkPtr DelegatingBackend::_reduce_scatter_base(at::Tensor& out, at::Tensor& in,
                                                const c10d::ReduceScatterOptions& options) {
  return other("_reduce_scatter_base")._reduce_scatter_base(out, in, options);
}
WorkPtr DelegatingBackend::reduce_scatter_tensor_coalesced(
    Tensors& outs, Tensors& ins, const c10d::ReduceScatterOptions& options) {
  return other("reduce_scatter_tensor_coalesced")
      .reduce_scatter_tensor_coalesced(outs, ins, options);
}
WorkPtr DelegatingBackend::alltoall_base(at::Tensor& out, at::Tensor& in,
                                         std::vector<std::int64_t>& out_sizes,
                                         std::vector<std::int64_t>& in_sizes,
                                         const c10d::AllToAllOptions& options) {
  return other("alltoall_base").alltoall_base(out, in, out_sizes, in_sizes, options);
}
WorkPtr DelegatingBackend::alltoall(Tensors& outs, Tensors& ins,
                                    const c10d::AllToAllOptions& options) {
  return other("alltoall").alltoall(outs, ins, options);
}
WorkPtr DelegatingBackend::send(Tensors& tensors, int to, int tag) {
  return other("send").send(tensors, to, tag);
}
WorkPtr DelegatingBackend::recv(Tensors& tensors, int from, int tag) {
  return other("recv").recv(tensors, from, tag);
}
WorkPtr DelegatingBackend::recvAnysource(Tensors& tensors, int tag) {
  return other("recvAnysource").recvAnysource(tensors, tag);
}
void DelegatingBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all) {
  other("monitoredBarrier").monitoredBarrier(options, wait_all);
}
void DelegatingBackend::setSequenceNumberForGroup() {
  other("setSequenceNumberForGroup").setSequenceNumberForGroup();
}
std::uint64_t DelegatingBackend::getSequenceNumberForGroup() {
  return other("getSequenceNumberForGroup").getSequenceNumberForGroup();
}

void DelegatingBackend::setTimeout(std::chrono::milliseconds timeout) {
  if (others_) others_->setTimeout(timeout);
}
void DelegatingBackend::abort() {
  if (others_) others_->abort();
}
void DelegatingBackend::shutdown() {
  if (others_) others_->shutdown();
}

namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

class StagedWork final : public c10d::Work {
 public:
  // Ends with what has been queued on `stream`.
  StagedWork(int rank, c10d::OpType type, const SideStream& stream, Tensors outputs)
      : Work(rank, type),
        end_(stream.mark()),
        device_(stream.stream().device()),
        outputs_(std::move(outputs)) {}
  bool isCompleted() override { return end_.query(); }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override {
    make_current_wait(end_, device_);
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  Tensors result() override { return outputs_; }

 private:
  c10::Event end_;
  at::Device device_;
  Tensors outputs_;
};

class StagedBackend final : public DelegatingBackend {
 public:
  StagedBackend(c10::intrusive_ptr<c10d::Backend> cpu, at::Device device)
      : DelegatingBackend(cpu->getRank(), cpu->getSize(), {}),
        cpu_(std::move(cpu)),
        stream_(device) {}

  const std::string getBackendName() const override { return "tessera-staged"; }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return staged(c10d::OpType::ALLREDUCE, tensors, tensors,
                  [&](Tensors& in, Tensors&) { return cpu_->allreduce(in, options); });
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return staged(c10d::OpType::BROADCAST, tensors, tensors,
                  [&](Tensors& in, Tensors&) { return cpu_->broadcast(in, options); });
  }
  WorkPtr allgather(std::vector<Tensors>& outs, Tensors& ins,
                    const c10d::AllgatherOptions& options) override {
    return staged(c10d::OpType::ALLGATHER, ins, outs.at(0), [&](Tensors& in, Tensors& out) {
      std::vector<Tensors> lists{out};
      return cpu_->allgather(lists, in, options);
    });
  }
  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in,
                          const c10d::AllgatherOptions& options) override {
    return staged(c10d::OpType::_ALLGATHER_BASE, {in}, {out}, [&](Tensors& from, Tensors& to) {
      return cpu_->_allgather_base(to[0], from[0], options);
    });
  }
  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& in,
                               const c10d::ReduceScatterOptions& options) override {
    return staged(c10d::OpType::_REDUCE_SCATTER_BASE, {in}, {out}, [&](Tensors& from, Tensors& to) {
      return cpu_->_reduce_scatter_base(to[0], from[0], options);
    });
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override { return cpu_->barrier(options); }

  void setTimeout(std::chrono::milliseconds timeout) override { cpu_->setTimeout(timeout); }
  void abort() override { cpu_->abort(); }
  void shutdown() override { cpu_->shutdown(); }

 private:
  // `call` gets copies of `ins` on the host and room for the outs; what changes in place is both.
  template <typename Call>
  WorkPtr staged(c10d::OpType type, const Tensors& ins, const Tensors& outs, Call&& call) {
    stream_.follow_current();
    const c10::StreamGuard guard(stream_.stream());
    const at::NoGradGuard no_grad;
    const bool in_place = &ins == &outs;
    Tensors from, to;
    for (const auto& in : ins) from.push_back(in.to(at::kCPU));
    for (const auto& out : outs)
      to.push_back(in_place ? at::Tensor() : at::empty_like(out, out.options().device(at::kCPU)));
    call(from, to)->wait();
    const auto& results = in_place ? from : to;
    for (std::size_t i = 0; i < outs.size(); ++i) outs[i].detach().copy_(results[i]);
    return c10::make_intrusive<StagedWork>(getRank(), type, stream_, outs);
  }

  c10::intrusive_ptr<c10d::Backend> cpu_;
  SideStream stream_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_staged_backend(c10::intrusive_ptr<c10d::Backend> cpu,
                                                      at::Device device) {
  return c10::make_intrusive<StagedBackend>(std::move(cpu), device);
}

}  // namespace tessera
