// AdamW and gradient clipping for sharded parameters. torch::nn::utils::clip_grad_norm_ would clip
// each rank by the norm of its own part, so it is refused: call tessera::clip_grad_norm.
//
// Each rank updates the rows it holds. Only clip_grad_norm communicates, and only one number. State
// and groups have PyTorch's own names, so a checkpoint of them is one of torch.optim.AdamW.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tessera/parameter.h"

namespace [[gnu::visibility("default")]] tessera {

struct AdamWOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 1e-2;
};

// Parameters that are updated with the same options.
struct ParameterGroup {
  std::vector<ShardedParameter> parameters;
  AdamWOptions options;
};

// The state of one parameter. Its tensors have the shape of the parameter's `local`. The first step
// that finds a gradient makes it.
struct AdamWState {
  torch::Tensor step;  // float32 scalar on the CPU: updates so far
  torch::Tensor exp_avg;
  torch::Tensor exp_avg_sq;
  [[nodiscard]] bool defined() const { return step.defined(); }
};

// PyTorch's AdamW (decoupled weight decay, no amsgrad), in one pass over contiguous runs of a
// shard. What lies at other strides, or has gradients of another dtype, is updated through copies.
class AdamW {
 public:
  // Takes all parameters as one group; frozen ones are updated once they are thawed. A parameter
  // that appears twice is `invalid_argument`, and so are options that libtorch refuses.
  explicit AdamW(std::vector<ShardedParameter> parameters, const AdamWOptions& options = {});
  explicit AdamW(std::vector<ParameterGroup> groups);
  ~AdamW();
  AdamW(AdamW&&) noexcept;
  AdamW& operator=(AdamW&&) noexcept;

  // Updates each parameter that has a gradient. Local. Sparse ones and expanded parameters throw.
  void step();
  // Forgets the gradients.
  void zero_grad();

  // Options may be changed between steps (learning rate schedules).
  [[nodiscard]] std::size_t group_count() const noexcept;
  [[nodiscard]] AdamWOptions& options(std::size_t group = 0);
  [[nodiscard]] const AdamWOptions& options(std::size_t group = 0) const;
  [[nodiscard]] const std::vector<ShardedParameter>& parameters(std::size_t group = 0) const;
  void set_lr(double lr);  // in every group
  // The state of parameter `index` of `group`. Its tensors are undefined before the first step.
  [[nodiscard]] const AdamWState& state(std::size_t group, std::size_t index) const;
  // Makes the state of every parameter that has none yet, with zeros. Loading a checkpoint needs
  // this.
  void make_state();
  // Copies `state` into the state of that parameter, or forgets it if `state` is undefined. Throws
  // `mismatch` for tensors of another shape than the parameter's `local`.
  void set_state(std::size_t group, std::size_t index, const AdamWState& state);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Scales the gradients so that their global norm is at most `max_norm`, and returns the norm
// before. The factor is min(1, max_norm / (norm + 1e-6)), as in torch.nn.utils.clip_grad_norm_.
// `norm_type` is the p of the p-norm, above 0; infinity means the largest magnitude. Missing
// gradients count as zero. Collective: every rank of the mesh gets the same number.
double clip_grad_norm(const std::vector<ShardedParameter>& parameters, double max_norm,
                      double norm_type = 2.0);

}  // namespace tessera
