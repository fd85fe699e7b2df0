// What can be changed about units while they train: the methods of PyTorch's FSDPModule, as
// functions on the module that fully_shard was applied to.
//
// With `recurse` they act on every unit at and below `module`, otherwise only on its own unit. All
// throw `invalid_argument` if there is no unit to act on. Every rank must call them alike, between
// passes. All of them are local, except set_keep_gathered, start_unshard and UnshardHandle::wait.
//
// Gradients that a backward without sync keeps on a rank (NoSync and set_requires_gradient_sync of
// tessera/fsdp.h) stay until the next backward with sync. What takes them away is as in PyTorch:
// - fully_shard: they are nowhere in sight. zero_grad of the module or of an optimizer takes away
//   what was averaged alone. A parameter that is frozen meanwhile gets them with the next sync.
// - FullyShardedDataParallel: zero_grad, of either, takes them away too. So that there is something
//   to take away, `local.grad()` is zeros where it would be missing. Whatever else changes it (a
//   clip, a scale) would change it without them: the next backward throws `unsupported`, unless all
//   was zeroed in place before, which cannot be told. Freezing takes them away with the next sync.
// - replicate, DistributedDataParallel: they are in grad(), and zero_grad takes them away.
// FullParams changes none of them; abandon_step forgets all.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torch/nn/module.h>
#include <torch/types.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "tessera/parameter.h"

namespace [[gnu::visibility("default")]] tessera {

namespace detail {
class Unit;
}  // namespace detail

// For a HybridMesh. False: gradients are summed over the ranks that share the parameters, and the
// sums wait on this rank. The first backward after it is true again adds them to its own sums, and
// sums all of them over the copies.
void set_requires_all_reduce(ModuleRef module, bool all_reduce, bool recurse = true);

// False: backward returns while reductions are under way, before the gradients are in the
// parameters. The next backward finishes them. Use it for all micro-batches but the last one.
void set_is_last_backward(ModuleRef module, bool is_last);

// Change the options of fully_shard with these names, from the next pass on.
void set_reshard_after_forward(ModuleRef module, bool reshard, bool recurse = true);
void set_reshard_after_backward(ModuleRef module, bool reshard, bool recurse = true);

// Units stay gathered between their forward and their backward if memory allows it: as long as
// their parameters together, in the dtype that they are gathered in, have at most `bytes`. Each
// saves a gather a step, and is freed after its backward as before. The last units of the forward
// come first, since their backwards do; one that does not fit is passed over. This is for units
// whose reshard_after_forward is unset (with FSDP1's FULL_SHARD it is). One that is set decides,
// and what it keeps is not counted, nor is the outermost unit, which stays in any case. What the
// budget does not reach is freed, or parked as reshard_after_forward_ranks says.
//
// The order is that of the first forward with gradients, in which nothing stays yet. In forwards
// without gradients nothing stays, but in an activation_checkpoint of a forward with them. `model`
// is the outermost module, else `invalid_argument`; `mismatch` if ranks give different numbers. 0:
// nothing stays. Collective.
void set_keep_gathered(ModuleRef model, std::int64_t bytes);

// The units whose gather starts when `module` has been gathered for its forward or backward. They
// take the place of the one that the last pass suggests; an empty list restores that one.
void set_modules_to_forward_prefetch(ModuleRef module, const std::vector<ModuleRef>& next);
void set_modules_to_backward_prefetch(ModuleRef module, const std::vector<ModuleRef>& next);

// Gradients are divided by `factor` instead of by the number of ranks, from the next reduction on.
// What was averaged before is not divided again: it is added. Throws `invalid_argument` unless it
// is a positive number, and where replicate has an average and gradients that NoSync keeps in one
// grad(): zero_grad and the end of the step part them.
void set_gradient_divide_factor(ModuleRef module, double factor, bool recurse = true);

// Called with the sum of this rank's part of the unit's gradients, before the division. The sum is
// one-dimensional, in the dtype of reductions. The call comes after the reduction; on a HybridMesh
// after the one over the copies. The hook may change the sum in place, with collectives of its own.
// Empty: no hook. Set it where a divide factor may be set.
using AllReduceHook = std::function<void(torch::Tensor& sum)>;
void set_all_reduce_hook(ModuleRef module, AllReduceHook hook, bool recurse = true);

// False: the unit is not gathered for backward, because its operators (such as an embedding) do not
// need the parameters there.
void set_unshard_in_backward(ModuleRef module, bool unshard);

// How many units' gradients may be on their way to the average at once. More units need more memory
// and overlap more with backward. The default is two. If the units of a model have different
// settings, the largest one counts. Throws `invalid_argument` below 1.
void set_reduce_scatter_max_input_buffers(ModuleRef module, int count, bool recurse = true);

// Collectives of your own for the unit of `module`. Every rank calls them in the same order. They
// return what must be waited for before `output` is read, or null if it is written already. `input`
// and `output` stay alive until then.
// - Gather: `output` holds the inputs of all ranks that share the parameters, in their order.
// - Reduce-scatter: `input` holds a slice for each of these ranks. `output` is the sum of the
//   slices for this rank, without any division.
// Both throw `invalid_argument` if nothing is sharded.
using Collective =
    std::function<c10::intrusive_ptr<c10d::Work>(torch::Tensor& output, torch::Tensor& input)>;
void set_custom_all_gather(ModuleRef module, Collective all_gather);
void set_custom_reduce_scatter(ModuleRef module, Collective reduce_scatter);

// Returned by start_unshard. A forward of the unit waits by itself.
class UnshardHandle {
 public:
  explicit UnshardHandle(std::vector<std::weak_ptr<detail::Unit>> units);
  // Waits until the parameters can be read through the module. May be called again. Collective.
  void wait();

 private:
  std::vector<std::weak_ptr<detail::Unit>> units_;
};
// Does unshard() of tessera/fsdp.h in the background. The parameters are those of now: an optimizer
// may step before the wait. Collective.
[[nodiscard]] UnshardHandle start_unshard(ModuleRef module);

// Buffers that are no part of a module's state: register_buffer with PyTorch's `persistent`, which
// libtorch's own register_buffer does not have.
//
//   struct AttentionImpl : torch::nn::Module {
//     torch::Tensor mask;
//     AttentionImpl() {
//       mask = tessera::register_buffer(*this, "mask", torch::ones({8, 8}).tril(), false);
//     }
//   };
//
// A buffer that is not persistent can be made again and does not belong in a checkpoint: saves,
// loads and state dicts of this library do not know it, so that a module has the names of a Python
// one with persistent=False. In all else (to(), mixed precision, sync_buffers, named_buffers) it is
// a buffer like others. libtorch's own torch::save(module, ...) writes it.
//
// That belongs to the tensor, not to the module: it holds where two modules have one buffer under
// one name, it ends with the tensor, and a tensor that takes its place says it anew.
// Module::clone() makes other tensors by the module's reset(), which says it there, or
// set_persistent has to be called for the clone. Any thread may call these functions.

// Registers `tensor` as Module::register_buffer does, and returns what that returns. An undefined
// tensor is in no state, whatever `persistent` says.
torch::Tensor& register_buffer(torch::nn::Module& module, const std::string& name,
                               const torch::Tensor& tensor, bool persistent = true);

// The same for a buffer that is there. Throws `not_found` if `module` itself has no such buffer.
void set_persistent(torch::nn::Module& module, const std::string& name, bool persistent);
[[nodiscard]] bool is_persistent(const torch::nn::Module& module, const std::string& name);

}  // namespace tessera
