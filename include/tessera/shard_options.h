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

namespace [[gnu::visibility("default")]] tessera {

// PyTorch's MixedPrecisionPolicy. Shards, their gradients and checkpoints keep the parameters' own
// dtype. Options that are not set change nothing. They take floating-point types; integer and
// complex parameters, and gradients of complex ones, stay in their own type.
struct MixedPrecision {
  // The dtype in which parameters are gathered and compute.
  std::optional<torch::Dtype> param_dtype = {};
  // The dtype in which gradients are reduced, and in which they accumulate while they are not
  // synchronised. Unset: param_dtype.
  std::optional<torch::Dtype> reduce_dtype = {};
  // Floating-point results of forward are cast to this; with FSDP1's units only those of the root.
  std::optional<torch::Dtype> output_dtype = {};
  // Floating-point inputs are cast to param_dtype.
  bool cast_forward_inputs = true;
  // The first forward casts floating-point buffers to this, and they stay so. full_state_dict and
  // saves have them in their own dtype.
  std::optional<torch::Dtype> buffer_dtype = {};
  // True: averaged gradients stay in param_dtype.
  bool keep_low_precision_grads = false;
  // True: a module in evaluation, module->eval(), computes in its parameters' and buffers' own
  // dtype (PyTorch's FSDP_USE_FULL_PREC_IN_EVAL). This is for forwards without gradients: with
  // gradients it is an error.
  bool full_precision_in_eval = false;
};

// When the unit whose backward comes next is gathered. pre: at the beginning of this unit's
// backward. post: after this unit is freed, which overlaps less and needs less memory.
enum class BackwardPrefetch : std::uint8_t { pre, post };

// How the parameters of a unit are cut over the ranks.
enum class ShardLayout : std::uint8_t {
  // Each by rows, as FSDP2 does: a rank holds rows of every parameter.
  rows,
  // They lie end to end, and the whole is cut into equal ranges, wherever that is: gathered shards
  // are the parameters as they lie in memory, so nothing is copied out of what was gathered. A
  // `local` has one dimension (ShardedParameter::flat), and may be empty on ranks before and behind
  // those that hold its parameter. Numbers, names and checkpoints are those of `rows`; of each
  // parameter a rank saves the boxes that its elements make up.
  flat,
};

struct ShardOptions {
  // True: free the unit when its module's forward returns. Unset: free it; the root stays, because
  // its backward follows at once.
  std::optional<bool> reshard_after_forward = {};
  // False: keep the unit gathered after its backward, for several micro-batches in a row.
  bool reshard_after_backward = true;
  MixedPrecision mixed_precision = {};
  // Unset: units are gathered only when they are needed.
  std::optional<BackwardPrefetch> backward_prefetch = BackwardPrefetch::pre;
  // The unit that came next in the last pass is gathered while this unit computes.
  bool forward_prefetch = true;
  // With a number k: after forward a rank keeps 1/k of the unit, not only its shard. For backward
  // it gathers the unit from its k neighbours. If k is the number of ranks on a host, these are on
  // its own host. PyTorch has this as a reshard_after_forward that is an int. k must divide the
  // number of ranks that share the unit. With 0, 1 or that number, reshard_after_forward decides.
  int reshard_after_forward_ranks = 0;
  // Units of one model may differ in it, ranks may not.
  ShardLayout layout = ShardLayout::rows;
  // Chooses the dimension that a parameter is sharded along. Unset or nothing: 0. The number of
  // ranks must divide the size of any other dimension. Not with a flat layout:
  // `invalid_argument`.
  std::function<std::optional<int>(const torch::Tensor& parameter)> shard_placement = {};
  // Shards, their gradients and with them the optimizer's state stay on the CPU, in pinned memory
  // if there is a device. They travel to the mesh's device to be gathered.
  bool offload_to_cpu = false;
  // Parameters that stay as they are: they are not sharded, and their gradients are not reduced.
  std::vector<torch::Tensor> ignored_parameters = {};
  // Gradients are divided by this instead of by the number of ranks; a positive number.
  std::optional<double> gradient_divide_factor = {};
  // Fills the unit's modules that are on the meta device, as `materialize` of
  // tessera/deferred_init.h says. Unset: they are filled from what deferred_init recorded.
  std::function<void(torch::nn::Module&)> param_init_fn = {};
};

// Options of replicate and DistributedDataParallel.
struct ReplicateOptions {
  // Gradients travel in buckets of this size, the last parameters first, while backward goes on.
  std::int64_t bucket_bytes = 25 << 20;
  // The first bucket is smaller, so that communication starts early.
  std::int64_t first_bucket_bytes = 1 << 20;
  // Ranks may run different numbers of micro-batches under NoSync before a backward that
  // synchronises, which adds up what each has, as PyTorch's does. Then only those backwards are
  // compared: of a rank that leaves out a whole step by mistake the others hear at the end.
  bool uneven_micro_batches = false;
};

namespace detail {

// How parameters are laid out in a unit's shards.
enum class Geometry : std::uint8_t {
  rows,           // every parameter by rows of dimension 0
  flat,           // end to end, and one flat parameter for the optimizer
  flat_original,  // end to end, and a part of the flat one for each parameter
};

// Whose rules a unit keeps to where PyTorch's two differ: what becomes of gradients that are not
// yet reduced and of those of frozen parameters, what stands in a unit's inputs, what a rank that
// holds nothing of a parameter has.
enum class Flavour : std::uint8_t {
  fsdp2,  // fully_shard, and replicate
  fsdp1,  // FullyShardedDataParallel
};

// What makes a unit. If `shard` is unset, parameters stay whole and in place on every rank.
struct UnitSpec {
  Mesh mesh;  // all ranks; owns the unit
  std::optional<Mesh> shard = {};
  std::optional<Mesh> replicate = {};
  ShardOptions options = {};
  ReplicateOptions buckets = {};
  Geometry geometry = Geometry::rows;
  Flavour flavour = Flavour::fsdp2;
  std::unordered_set<const torch::nn::Module*> ignored_modules = {};  // and all below each
  bool sync_states = false;       // parameters and buffers become rank 0's
  bool cast_root_inputs = false;  // where the unit is the root, whatever cast_forward_inputs says
};

}  // namespace detail

}  // namespace tessera
