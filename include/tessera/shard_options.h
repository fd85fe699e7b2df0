// How fully_shard and replicate treat a module: options, with PyTorch's names.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <unordered_set>
#include <vector>

#include "tessera/mesh.h"

namespace tessera {

// PyTorch's MixedPrecisionPolicy. Shards, their gradients and checkpoints keep the
// parameters' own dtype; nothing set changes nothing.
struct MixedPrecision {
  // Of gathered parameters: what travels and computes.
  std::optional<torch::Dtype> param_dtype = {};
  // Gradients are reduced in, and accumulated in while they are not synchronised; unset:
  // param_dtype.
  std::optional<torch::Dtype> reduce_dtype = {};
  // Floating-point results of forward are cast to it; of FSDP1's units those of the root alone.
  std::optional<torch::Dtype> output_dtype = {};
  // Floating-point inputs are cast to param_dtype.
  bool cast_forward_inputs = true;
  // Floating-point buffers are cast to it by the first forward and stay so; full_state_dict has
  // them in their own.
  std::optional<torch::Dtype> buffer_dtype = {};
  // Averaged gradients stay in param_dtype.
  bool keep_low_precision_grads = false;
  // A module in evaluation, module->eval(), computes in its parameters' and buffers' own dtype
  // (PyTorch's FSDP_USE_FULL_PREC_IN_EVAL). For forwards without gradients: with them it
  // is an error.
  bool full_precision_in_eval = false;
};

// When the unit whose backward comes next is gathered: at the beginning of this one's
// backward, or after this one is freed, which overlaps less and needs less memory.
enum class BackwardPrefetch : std::uint8_t { pre, post };

struct ShardOptions {
  // Free the unit when its module's forward returns. Unset: yes, except for the root, whose
  // backward comes at once.
  std::optional<bool> reshard_after_forward = {};
  // Keep the unit gathered after its backward: for several micro-batches in a row.
  bool reshard_after_backward = true;
  MixedPrecision mixed_precision = {};
  // Unset: units are gathered when they are needed.
  std::optional<BackwardPrefetch> backward_prefetch = BackwardPrefetch::pre;
  // Gather the unit that came next in the last pass while this one computes.
  bool forward_prefetch = true;
  // With a number k: after forward a rank keeps 1/k of the unit instead of freeing down to its
  // shard, and gathers it for backward from its k neighbours, which are on its host when k is their
  // number (reshard_after_forward as an int). A factor of the ranks that share the unit;
  // 0, 1 and all of them are what reshard_after_forward says.
  int reshard_after_forward_ranks = 0;
  // The dimension that a parameter is sharded along; unset or nothing: 0. Others than 0 need sizes
  // that the ranks divide.
  std::function<std::optional<int>(const torch::Tensor& parameter)> shard_placement = {};
  // Shards, their gradients and with them the optimizer's state stay on the CPU, in pinned memory
  // where there is a device, and travel to the mesh's device to be gathered.
  bool offload_to_cpu = false;
  // Parameters that stay as they are: not sharded, their gradients not reduced.
  std::vector<torch::Tensor> ignored_parameters = {};
  // Gradients are divided by it instead of by the number of ranks.
  std::optional<double> gradient_divide_factor = {};
  // Fills the unit's modules that are on the meta device, as `materialize` of
  // tessera/deferred_init.h says. Unset: what deferred_init recorded does.
  std::function<void(torch::nn::Module&)> param_init_fn = {};
};

// Options of replicate and DistributedDataParallel.
struct ReplicateOptions {
  // Gradients travel in buckets of this size, the last parameters first, while backward goes on.
  std::int64_t bucket_bytes = 25 << 20;
  // The first bucket is smaller, so that communication starts early.
  std::int64_t first_bucket_bytes = 1 << 20;
};

namespace detail {

// How parameters are laid out in a unit's shards.
enum class Geometry : std::uint8_t {
  rows,           // FSDP2: every parameter by rows of dimension 0
  flat,           // FSDP1: one flat parameter for the optimizer
  flat_original,  // FSDP1 with use_orig_params: parts of the flat one for each parameter
};

// What makes a unit. `shard` unset: parameters stay whole where they are, on every rank.
struct UnitSpec {
  Mesh mesh;  // all ranks; owns the unit
  std::optional<Mesh> shard = {};
  std::optional<Mesh> replicate = {};
  ShardOptions options = {};
  ReplicateOptions buckets = {};
  Geometry geometry = Geometry::rows;
  std::unordered_set<const torch::nn::Module*> ignored_modules = {};  // and all below each
  bool sync_states = false;       // parameters and buffers are rank 0's
  bool cast_root_inputs = false;  // where the unit is the root, whatever cast_forward_inputs says
};

}  // namespace detail

}  // namespace tessera
