#include "torch/staged_backend.h"

#include <c10/core/StreamGuard.h>
#include <torch/torch.h>

#include <utility>
#include <vector>

#include "torch/delegating_backend.h"
#include "torch/side_stream.h"

namespace tessera {
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
