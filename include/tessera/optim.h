// AdamW and gradient clipping on sharded parameters. torch::nn::utils::clip_grad_norm_ would clip
// each rank by the norm of its own part, and is refused: call tessera::clip_grad_norm.
//
// Each rank updates the rows it holds; nothing is communicated but one number in clip_grad_norm.
// State and groups carry PyTorch's own names, so that a checkpoint of them is one of
// torch.optim.AdamW.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tessera/parameter.h"

namespace tessera {

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

// The state of one parameter; tensors have the shape of its `local`. Made by the first step that
// finds a gradient.
struct AdamWState {
  torch::Tensor step;  // float32 scalar on the CPU: updates so far
  torch::Tensor exp_avg;
  torch::Tensor exp_avg_sq;
  [[nodiscard]] bool defined() const { return step.defined(); }
};

// PyTorch's AdamW (decoupled weight decay, no amsgrad), in one pass over contiguous runs of a
// shard.
class AdamW {
 public:
  // One group. Parameters that require no gradient are left out, as is one that appears twice:
  // `invalid_argument`.
  explicit AdamW(std::vector<ShardedParameter> parameters, const AdamWOptions& options = {});
  explicit AdamW(std::vector<ParameterGroup> groups);
  ~AdamW();
  AdamW(AdamW&&) noexcept;
  AdamW& operator=(AdamW&&) noexcept;

  // Updates every parameter that has a gradient. Local.
  void step();
  // Forgets the gradients.
  void zero_grad();

  // Options may be changed between steps (learning rate schedules).
  [[nodiscard]] std::size_t group_count() const noexcept;
  [[nodiscard]] AdamWOptions& options(std::size_t group = 0);
  [[nodiscard]] const AdamWOptions& options(std::size_t group = 0) const;
  [[nodiscard]] const std::vector<ShardedParameter>& parameters(std::size_t group = 0) const;
  void set_lr(double lr);  // in every group
  // Of the parameter `index` of `group`; undefined tensors before its first step.
  [[nodiscard]] const AdamWState& state(std::size_t group, std::size_t index) const;
  // Makes the state of every parameter, zeros, where it is missing: what loading a checkpoint
  // needs.
  void make_state();
  // Copies `state` into the state of that parameter; an undefined one: forgets it. Throws
  // `mismatch` for tensors of another shape than the parameter's `local`.
  void set_state(std::size_t group, std::size_t index, const AdamWState& state);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Scales the gradients so that their global norm is at most `max_norm`, and returns the norm
// before. As torch.nn.utils.clip_grad_norm_: the factor is min(1, max_norm / (norm + 1e-6)).
// `norm_type` is the p of the p-norm, above 0; infinity: the largest magnitude. Collective: every
// rank of the mesh gets the same number. Gradients that are missing count as zero.
double clip_grad_norm(const std::vector<ShardedParameter>& parameters, double max_norm,
                      double norm_type = 2.0);

}  // namespace tessera
