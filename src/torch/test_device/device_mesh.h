// Threads as ranks of one mesh, each with a test device of its own.
#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "torch/delegating_backend.h"
#include "torch/mesh_state.h"
#include "torch/test_device/test_device.h"
#include "torch/testing.h"

namespace tessera::testing {

// Collectives of the backend below, as NCCL's would be: on a stream of their own, and what they do
// to carry bytes through the host's memory is not counted. Each is one launch.
class UncountedBackend final : public DelegatingBackend {
 public:
  UncountedBackend(c10::intrusive_ptr<c10d::Backend> inner, int device)
      : DelegatingBackend(inner->getRank(), inner->getSize(), inner),
        inner_(std::move(inner)),
        device_(device) {}
  const std::string getBackendName() const override { return inner_->getBackendName(); }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return count("allreduce", [&] { return inner_->allreduce(tensors, options); });
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return count("broadcast", [&] { return inner_->broadcast(tensors, options); });
  }
  WorkPtr allgather(std::vector<Tensors>& outs, Tensors& ins,
                    const c10d::AllgatherOptions& options) override {
    return count("allgather", [&] { return inner_->allgather(outs, ins, options); });
  }
  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in,
                          const c10d::AllgatherOptions& options) override {
    return count("allgather", [&] { return inner_->_allgather_base(out, in, options); });
  }
  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& in,
                               const c10d::ReduceScatterOptions& options) override {
    return count("reduce_scatter", [&] { return inner_->_reduce_scatter_base(out, in, options); });
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override { return inner_->barrier(options); }

 private:
  template <typename Call>
  WorkPtr count(const char* name, Call&& call) {
    static_cast<void>(launch(device_, std::string("collective ") + name));
    const Uncounted uncounted;
    return call();
  }

  c10::intrusive_ptr<c10d::Backend> inner_;
  int device_;
};

// From here on collectives of `mesh`, on a test device, are those of UncountedBackend. A mesh that
// was split off has its own.
inline void count_collectives(const Mesh& mesh) {
  const auto& group = detail::state_of(mesh)->process_group;
  if (!group) return;
  const auto type = mesh.device().type();
  // A kind that the group has would be reused.
  group->setBackend(
      type, c10d::ProcessGroup::BackendType::UCC,
      c10::make_intrusive<UncountedBackend>(group->getBackend(type), mesh.device().index()));
}

// As run_mesh; rank r computes on device r.
inline void run_device_mesh(int ranks, const std::function<void(Mesh&)>& body) {
  run_mesh(
      ranks,
      [&](Mesh& mesh) {
        count_collectives(mesh);
        body(mesh);
      },
      std::chrono::seconds(60), true, &test_device);
}

}  // namespace tessera::testing
