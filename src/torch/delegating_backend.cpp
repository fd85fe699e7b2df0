#include "torch/delegating_backend.h"

#include <string>

#include "tessera/error.h"

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

}  // namespace tessera
