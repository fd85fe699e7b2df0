// What can be changed about units while they train: the methods of PyTorch's FSDPModule, as
// functions on the module that fully_shard was applied to.
//
// With `recurse` they act on every unit at and below `module`, without on its own unit alone. All
// throw `invalid_argument` when there is no unit to act on. Every rank has to call them alike,
// between passes; all are local.
#pragma once

#include <torch/types.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <functional>
#include <memory>
#include <vector>

#include "tessera/module_ref.h"

namespace tessera {

namespace detail {
class Unit;
}  // namespace detail

// On a HybridMesh, false: gradients are summed over the ranks that share the parameters, and the
// sums wait on this rank, until a backward after it is true again adds them to its own and sums all
// over the copies.
void set_requires_all_reduce(ModuleRef module, bool all_reduce, bool recurse = true);

// False: backward returns while reductions are under way, and gradients are not in the parameters
// yet; the next backward finishes them. For the micro-batches before the last one.
void set_is_last_backward(ModuleRef module, bool is_last);

// The options of fully_shard with these names, from the next pass on.
void set_reshard_after_forward(ModuleRef module, bool reshard, bool recurse = true);
void set_reshard_after_backward(ModuleRef module, bool reshard, bool recurse = true);

// Units that start to be gathered when `module` has been gathered for its forward or backward,
// instead of the one that the last pass says comes next. An empty list restores that.
void set_modules_to_forward_prefetch(ModuleRef module, const std::vector<ModuleRef>& next);
void set_modules_to_backward_prefetch(ModuleRef module, const std::vector<ModuleRef>& next);

// Gradients are divided by `factor` instead of by the number of ranks, from the next backward on.
// Throws `invalid_argument` unless it is a positive number.
void set_gradient_divide_factor(ModuleRef module, double factor, bool recurse = true);

// Called with the sum of this rank's part of the unit's gradients, one-dimensional and in the dtype
// of reductions, before it is divided: after the reduction, on a HybridMesh after the one over the
// copies. It may change the sum in place, with collectives of its own. Empty: none.
using AllReduceHook = std::function<void(torch::Tensor& sum)>;
void set_all_reduce_hook(ModuleRef module, AllReduceHook hook, bool recurse = true);

// False: the unit is not gathered for backward, because its operators do not need the parameters
// there, such as those of an embedding.
void set_unshard_in_backward(ModuleRef module, bool unshard);

// How many units' gradients may be under way to their average at once: memory against overlap
// with backward. Two unless said otherwise; the largest number of a model's units counts. Throws
// `invalid_argument` below 1.
void set_reduce_scatter_max_input_buffers(ModuleRef module, int count, bool recurse = true);

// Collectives of one's own for the unit of `module`, called on every rank in the same order.
// They return what is waited for before `output` is read, null when it is written already. `input`
// and `output` stay alive until then.
// Gather: `output` holds the inputs of all ranks that share the parameters, in their order.
// Reduce-scatter: `input` holds a slice for each of them; `output` is the sum of the slices that
// are for this one, nothing divided. Both throw `invalid_argument` where nothing is sharded.
using Collective =
    std::function<c10::intrusive_ptr<c10d::Work>(torch::Tensor& output, torch::Tensor& input)>;
void set_custom_all_gather(ModuleRef module, Collective all_gather);
void set_custom_reduce_scatter(ModuleRef module, Collective reduce_scatter);

// What start_unshard returns. A forward of the unit waits by itself.
class UnshardHandle {
 public:
  explicit UnshardHandle(std::vector<std::weak_ptr<detail::Unit>> units);
  // Until the parameters can be read through the module. May be called again. Collective.
  void wait();

 private:
  std::vector<std::weak_ptr<detail::Unit>> units_;
};
// unshard() of tessera/fsdp.h, in the background. Collective.
[[nodiscard]] UnshardHandle start_unshard(ModuleRef module);

}  // namespace tessera
