#include "fsdp/unit/custom_channel.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include "fsdp/unit/grad_reducer.h"
#include "tessera/error.h"
#include "tessera/pytorch/fully_sharded_data_parallel.h"
#include "torch/c10_error.h"
#include "torch/compat.h"
#include "torch/mesh_state.h"

namespace tessera::detail {
namespace {

class CustomChannel final : public Channel {
 public:
  CustomChannel(std::unique_ptr<Channel> inner, int ranks, const at::TensorOptions& travelling,
                Collective all_gather, Collective reduce_scatter)
      : inner_(std::move(inner)),
        ranks_(ranks),
        travelling_(travelling),
        all_gather_(std::move(all_gather)),
        reduce_scatter_(std::move(reduce_scatter)) {}

  const at::Tensor& shard() const override { return inner_->shard(); }
  void set_label(std::string label) override { inner_->set_label(std::move(label)); }
  at::Tensor exchange(const at::Tensor& mine) override { return inner_->exchange(mine); }

  void start_gather(Take take, bool may_change) override {
    if (!all_gather_) return inner_->start_gather(std::move(take), may_change);
    gather_to(at::empty({ranks_ * shard().numel()}, travelling_), std::move(take));
  }
  bool start_gather_into(const Memory& memory, bool may_change) override {
    if (!all_gather_) return inner_->start_gather_into(memory, may_change);
    gather_to(memory(), [](int, std::int64_t, const at::Tensor&) {});
    return true;
  }

  void finish_gather() override {
    if (!all_gather_) return inner_->finish_gather();
    const auto take = std::exchange(take_, {});
    const auto count = std::exchange(input_, {}).numel();
    const auto all = std::exchange(output_, {});
    if (!take) return;  // it has failed before
    wait(gather_, "custom all-gather");
    for (int rank = 0; rank < ranks_; ++rank) take(rank, 0, all.narrow(0, rank * count, count));
  }

  void start_reduce(const SliceSum& sum, Fill fill) override {
    if (!reduce_scatter_) return inner_->start_reduce(sum, std::move(fill));
    const torch::NoGradGuard no_grad;
    slices_ = at::empty({ranks_ * sum.elements}, travelling_.dtype(sum.dtype));
    for (int rank = 0; rank < ranks_; ++rank)
      fill(rank, 0, slices_.narrow(0, rank * sum.elements, sum.elements));
    sum_ = at::empty({sum.elements}, slices_.options());
    averaged_ = sum.averaged;
    reduce_ = communicate("custom reduce-scatter", [&] { return reduce_scatter_(sum_, slices_); });
  }

  at::Tensor finish_reduce() override {
    if (!reduce_scatter_) return inner_->finish_reduce();
    wait(reduce_, "custom reduce-scatter");
    slices_ = at::Tensor();
    if (averaged_ > 0) sum_.narrow(0, 0, averaged_).div_(ranks_);
    return std::exchange(sum_, {});
  }

 private:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  void gather_to(at::Tensor all, Take take) {
    const torch::NoGradGuard no_grad;
    input_ = shard().to(travelling_, /*non_blocking=*/false, /*copy=*/true);
    output_ = std::move(all);
    gather_ = communicate("custom all-gather", [&] { return all_gather_(output_, input_); });
    take_ = std::move(take);
  }
  static void wait(WorkPtr& work, const char* what) {
    if (const auto under_way = std::exchange(work, {}))
      communicate(what, [&] { under_way->wait(); });
  }

  std::unique_ptr<Channel> inner_;
  int ranks_;
  at::TensorOptions travelling_;
  Collective all_gather_, reduce_scatter_;
  at::Tensor input_, output_;  // while a gather is under way
  at::Tensor slices_, sum_;    // while a reduction is under way
  std::int64_t averaged_ = 0;  // of the sum
  Take take_;                  // while a gather is under way
  WorkPtr gather_, reduce_;
};

}  // namespace

ChannelWrapper custom_channels(Collective all_gather, Collective reduce_scatter) {
  return [all_gather = std::move(all_gather), reduce_scatter = std::move(reduce_scatter)](
             std::unique_ptr<Channel> channel, int ranks,
             const at::TensorOptions& travelling) -> std::unique_ptr<Channel> {
    return std::make_unique<CustomChannel>(std::move(channel), ranks, travelling, all_gather,
                                           reduce_scatter);
  };
}

}  // namespace tessera::detail

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
