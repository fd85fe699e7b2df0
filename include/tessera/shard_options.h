// How fully_shard and replicate treat a module: options, with PyTorch's names.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "tessera/mesh.h"

namespace tessera {

// PyTorch's MixedPrecisionPolicy (spec F5). Shards, their gradients and checkpoints keep the
// parameters' own dtype; nothing set changes nothing.
struct MixedPrecision {
  std::optional<torch::Dtype> param_dtype =
      {};  // of gathered parameters: what travels and computes
  std::optional<torch::Dtype> reduce_dtype =
      {};  // gradients are reduced in, and accumulated in while
           // they are not synchronised; unset: param_dtype
  std::optional<torch::Dtype> output_dtype =
      {};                           // floating-point results of forward are cast to it
  bool cast_forward_inputs = true;  // floating-point inputs to param_dtype
};

// When the unit whose backward comes next is gathered (spec E3): at the begin of this one's
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
  // Parameters that stay as they are: not sharded, their gradients not reduced (spec F7).
  std::vector<torch::Tensor> ignored_parameters = {};
  // Gradients are divided by it instead of by the number of ranks (spec F32).
  std::optional<double> gradient_divide_factor = {};
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
};

}  // namespace detail

}  // namespace tessera
