#include "tessera/pytorch/comm_hooks.h"

#include <torch/torch.h>

#include <memory>
#include <utility>
#include <vector>

#include "fsdp/unit/grad_reducer.h"
#include "tessera/error.h"
#include "torch/c10_error.h"
#include "torch/compat.h"
#include "torch/mesh_state.h"

namespace tessera {
namespace {

// Units keep hooks and the mesh keeps units, so a hook may not keep the mesh.
class WeakMesh {
 public:
  explicit WeakMesh(const Mesh& mesh) : state_(detail::state_of(mesh)->weak_from_this()) {}
  [[nodiscard]] Mesh get() const {
    auto state = state_.lock();
    if (!state)
      throw Error(ErrorCode::invalid_argument, "the mesh of a communication hook is gone");
    return detail::mesh_of(std::move(state));
  }

 private:
  std::weak_ptr<detail::MeshState> state_;
};

// Into `shard`, or in place where there is none.
void sum_over(const Mesh& mesh, torch::Tensor& gradient, torch::Tensor& shard) {
  const auto& group = mesh.process_group();
  if (!group) {
    if (shard.defined()) shard.copy_(gradient);
  } else if (shard.defined()) {
    compat::reduce_scatter(*group, shard, gradient)->wait();
  } else {
    std::vector<torch::Tensor> tensors{gradient};
    group->allreduce(tensors)->wait();
  }
}

void average(const Mesh& mesh, torch::Tensor& gradient, torch::Tensor& shard) {
  const auto scale = detail::GradScale::make(mesh.size(), gradient.scalar_type());
  if (scale.before != 1) gradient.div_(scale.before);
  auto& result = shard.defined() ? shard : gradient;
  communicate("communication hook", [&] { sum_over(mesh, gradient, shard); });
  if (scale.after != 1) result.div_(scale.after);
}

CommHook compress_hook(const Mesh& mesh, torch::Dtype dtype) {
  return [weak = WeakMesh(mesh), dtype](torch::Tensor& gradient, torch::Tensor& shard) {
    auto short_gradient = gradient.to(dtype);
    auto short_shard = shard.defined() ? shard.to(dtype) : shard;
    average(weak.get(), short_gradient, short_shard);
    if (shard.defined()) {
      shard.copy_(short_shard);
    } else {
      gradient.copy_(short_gradient);
    }
  };
}

}  // namespace

CommHook average_hook(const Mesh& mesh) {
  return [weak = WeakMesh(mesh)](torch::Tensor& gradient, torch::Tensor& shard) {
    average(weak.get(), gradient, shard);
  };
}

CommHook fp16_compress_hook(const Mesh& mesh) {
  return compress_hook(mesh, torch::kHalf);
}

CommHook bf16_compress_hook(const Mesh& mesh) {
  return compress_hook(mesh, torch::kBFloat16);
}

}  // namespace tessera
