// ShardedGradScaler: dynamic loss scaling for half-precision training on shards.
//
//   ShardedGradScaler scaler(mesh);
//   for (const auto& [input, target] : batches) {
//     optimizer.zero_grad();
//     scaler.scale(cross_entropy(model(input), target)).backward();
//     scaler.unscale(optimizer);              // only where gradients are looked at before the step
//     clip_grad_norm(parameters, max_norm);
//     scaler.step(optimizer);
//     scaler.update();
//   }
//
// Small gradients are zero in float16. Multiplying the loss by a scale lifts them, and they are
// divided by it again before the optimizer sees them. If a gradient of any rank is infinite or not
// a number, every rank leaves out the step, and the scale shrinks. After a while without such
// gradients it grows. Rules and numbers are those of PyTorch's torch.amp.GradScaler and
// ShardedGradScaler.
#pragma once

#include <torch/optim/optimizer.h>
#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <unordered_map>
#include <vector>

#include "tessera/mesh.h"
#include "tessera/optim.h"
#include "tessera/parameter.h"
#include "tessera/value.h"

namespace [[gnu::visibility("default")]] tessera {

struct GradScalerOptions {
  // Kept as float32. The gradient of a float16 loss is the scale itself, and 65536 is infinite in
  // float16. So with such a loss the first step is left out.
  double init_scale = 65536.0;
  double growth_factor = 2.0;           // above 1
  double backoff_factor = 0.5;          // below 1
  std::int64_t growth_interval = 2000;  // updates in a row without inf or nan; below 1: never grows
  // False: `scale` returns its argument, `step` only takes the optimizer's step, and no other
  // member does anything.
  bool enabled = true;
};

// Every rank of the mesh makes the same calls, from one thread, as for the mesh. The scaler knows
// an optimizer by its address: do not move or replace one between its unscale or step and the next
// update. Misuse throws `invalid_argument` before anything is changed.
class ShardedGradScaler {
 public:
  // `mesh` holds all ranks that must decide alike. Throws `invalid_argument` for options that are
  // out of range, unless the scaler is not enabled.
  explicit ShardedGradScaler(Mesh mesh, const GradScalerOptions& options = {});
  // The ranks of both dimensions decide alike.
  explicit ShardedGradScaler(const HybridMesh& mesh, const GradScalerOptions& options = {});
  ShardedGradScaler(ShardedGradScaler&&) = default;
  ShardedGradScaler& operator=(ShardedGradScaler&&) = default;

  // Returns the outputs times the scale, each in its own dtype. Local.
  [[nodiscard]] torch::Tensor scale(const torch::Tensor& output);
  [[nodiscard]] std::vector<torch::Tensor> scale(const std::vector<torch::Tensor>& outputs);

  // Divides the gradients of the optimizer's parameters by the scale, in place and in their dtype,
  // and notes whether any gradient of any rank is infinite or not a number. Parameters without a
  // gradient are passed over; a rank without any gradients takes part. Call it once per optimizer
  // and update, when all of the optimizer's gradients are there. Throws if it is called twice or
  // after `step`, or if `scale` never was called. Collective.
  void unscale(AdamW& optimizer);
  void unscale(torch::optim::Optimizer& optimizer);
  // The same for parameters that no such optimizer updates. Returns whether all gradients of all
  // ranks are finite. If they are not, the caller leaves out its update, as every rank does.
  [[nodiscard]] bool unscale(const std::vector<ShardedParameter>& parameters);

  // Unscales, unless that was done, and takes the optimizer's step if all gradients of all ranks
  // are finite. Returns whether it took the step. Call it once per optimizer and update. Optimizers
  // that need a closure (LBFGS) do not work. Collective.
  bool step(AdamW& optimizer);
  bool step(torch::optim::Optimizer& optimizer);

  // Call it after the steps of all optimizers. It multiplies the scale by backoff_factor if a step
  // was left out, and by growth_factor if none was for growth_interval updates in a row and the
  // product is finite. If `new_scale` is given, finite and above 0, it becomes the scale instead.
  // Throws if there was no unscale or step since the last update and no `new_scale`. Local; all
  // ranks get the same.
  void update(std::optional<double> new_scale = {});

  [[nodiscard]] double get_scale() const;  // 1 if it is not enabled
  [[nodiscard]] bool is_enabled() const noexcept { return options_.enabled; }

  // What a checkpoint needs, under the names of PyTorch's state_dict: {"scale", "growth_factor",
  // "backoff_factor", "growth_interval", "_growth_tracker"}. Empty if the scaler is not enabled.
  // Take it after `update`. It is the same on every rank.
  [[nodiscard]] Value state_dict() const;
  // Continues from such a tree, made by Tessera or PyTorch. Does nothing if the scaler is not
  // enabled. Throws `invalid_argument` for the tree of a scaler that was not enabled and for a
  // scale that is not a finite number above 0, `not_found` for a missing entry, `mismatch` for an
  // entry of another type, and `limit` for a tracker that does not fit 32 bits. Nothing is changed
  // then.
  void load_state_dict(const Value& state);

 private:
  struct Subject;  // whose gradients they are, and what its step is
  struct Check {
    bool stepped = false;
    torch::Tensor found_inf;  // float32 [1] on the mesh's device: above 0 when some rank found any
  };

  void require_scaled(const char* method) const;
  [[nodiscard]] torch::Tensor unscale_all(const std::vector<torch::Tensor>& parameters);
  void unscale_once(const Subject& subject);
  bool step_once(const Subject& subject);

  Mesh mesh_;
  GradScalerOptions options_;
  torch::Tensor scale_;           // float32 scalar on the mesh's device; undefined: not enabled
  torch::Tensor growth_tracker_;  // int32 scalar there: updates without inf or nan in a row
  bool scaled_ = false;           // `scale` was called: gradients may be scaled ones
  // What follows is since the last update. Keys are optimizers, or tensors of parameters that were
  // given without an optimizer.
  std::unordered_map<const void*, Check> checks_;
  torch::Tensor found_inf_;  // of all checks together; undefined: there was none
};

}  // namespace tessera
