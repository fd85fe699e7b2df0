// SyncBatchNorm: batch normalization by the statistics of all ranks' batches, with PyTorch's
// options.
//
//   SyncBatchNorm norm(torch::nn::BatchNormOptions(64).momentum(0.01), mesh);
//
//   torch::nn::Sequential net(torch::nn::Linear(8, 64), torch::nn::BatchNorm1d(64));
//   convert_sync_batchnorm(net, mesh);
//   fully_shard(net, mesh);
//
// In training the ranks exchange mean, variance and number of their values per channel in each
// forward, and two sums per channel in each backward: outputs, running statistics and gradients are
// what one process gets for the batches of all ranks together. Batches may have different sizes,
// and be empty on some ranks. In eval() nothing travels, as in training on a mesh of one rank,
// where it is torch::nn::BatchNorm.
//
// The running statistics of a plain BatchNorm are each rank's own, as in PyTorch. fully_shard,
// FSDP1 and replicate leave buffers alone; DistributedDataParallel gives all ranks rank 0's before
// each forward, which changes them. Of buffers that differ, saves of a TrainingState and a
// Checkpointer take rank 0's, and warn once in each save; SaveOptions::copies can refuse or keep
// them instead. The model keeps what it has, and state dicts have each rank's own. sync_buffers()
// of tessera/fsdp.h gives all ranks rank 0's. With SyncBatchNorm they do not differ.
//
// In training all ranks call the same modules in the same order and go backward through them; ranks
// that differ get `mismatch` or `timeout`. That holds for evaluations in training mode, too. A rank
// whose batches have come to an end goes on with stand-ins: Join of tessera/ddp.h.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <cstddef>
#include <iosfwd>
#include <optional>

#include "tessera/fsdp.h"
#include "tessera/mesh.h"

namespace [[gnu::visibility("default")]] tessera {

// Members, names in a state dict and what is updated when are those of torch::nn::BatchNorm, for
// inputs of two and more dimensions. Parameters are sharded like any others. Statistics of bfloat16
// and float16 inputs are taken and kept in float32, and parameters and buffers may have another
// dtype than the input. The result has the input's.
class SyncBatchNormImpl : public torch::nn::Cloneable<SyncBatchNormImpl> {
 public:
  SyncBatchNormImpl(const torch::nn::BatchNormOptions& chosen, const Mesh& mesh);
  // Without a mesh: convert_sync_batchnorm gives it one, before it is called in training.
  explicit SyncBatchNormImpl(const torch::nn::BatchNormOptions& chosen);
  // In the place of a BatchNorm: has its options and mode, and shares its parameters and buffers.
  template <std::size_t D, typename Derived>
  SyncBatchNormImpl(const torch::nn::BatchNormImplBase<D, Derived>& norm, const Mesh& mesh)
      : options(norm.options), mesh_(mesh) {
    enter(norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.num_batches_tracked);
    train(norm.is_training());
  }

  // Throws `invalid_argument` for an input of other channels or of less than two dimensions, in
  // training without a mesh, and if all batches together have one value per channel (on a CUDA
  // device only where the mesh is one rank: else that is normalized to zero). `unsupported`: a
  // backward with create_graph through the statistics of several ranks.
  torch::Tensor forward(const torch::Tensor& input);

  void reset() override;
  void reset_parameters();
  void reset_running_stats();
  void pretty_print(std::ostream& stream) const override;

  void set_mesh(const Mesh& mesh) { mesh_ = mesh; }

  torch::nn::BatchNormOptions options;
  torch::Tensor weight, bias;
  torch::Tensor running_mean, running_var, num_batches_tracked;
  // Whether this rank's batches count among those of all. Join (ddp.h) clears it for a stand-in.
  bool counts = true;

 private:
  void enter(const torch::Tensor& scale, const torch::Tensor& shift, const torch::Tensor& mean,
             const torch::Tensor& variance, const torch::Tensor& count);
  void require_input(const torch::Tensor& input) const;
  [[nodiscard]] double share_of_batch() const;
  torch::Tensor normalize_alone(const torch::Tensor& input, double factor);
  torch::Tensor normalize_together(const torch::Tensor& input, double factor);

  std::optional<Mesh> mesh_;
};
TESSERA_MODULE(SyncBatchNorm);

// Makes the BatchNorm1d, 2d and 3d at and below `module` SyncBatchNorms over `mesh` which share
// their parameters and buffers, so that optimizers and names stay right, and gives `mesh` to each
// SyncBatchNorm that is there already. Call it before the module is sharded or replicated.
//
// C++ lets it exchange the entries of a torch::nn::Sequential, and those alone: a member like
// `torch::nn::BatchNorm2d bn` of a class of yours would go on being what its forward calls. So it
// throws `unsupported` naming the BatchNorm that is elsewhere, or whose class is derived from
// libtorch's: declare that member as SyncBatchNorm, without a mesh if the class knows none.
// `invalid_argument`: parameters belong to a unit already. Where it throws nothing was changed.
void convert_sync_batchnorm(torch::nn::Module& module, const Mesh& mesh);
template <typename Impl>
void convert_sync_batchnorm(const torch::nn::ModuleHolder<Impl>& module, const Mesh& mesh) {
  convert_sync_batchnorm(static_cast<torch::nn::Module&>(*module.ptr()), mesh);
}

}  // namespace tessera
