// DistributedDataParallel: every rank holds the whole model, and gradients are averaged.
//
//   DistributedDataParallel<Gpt> model(Gpt(config), mesh);
//   torch::optim::AdamW optimizer(model->parameters(), 1e-3);
//   cross_entropy(model(input), target).backward();
//   optimizer.step();
//
// It wraps `replicate`. First it gives every rank rank 0's parameters. Then it gives them rank 0's
// buffers before each forward in training, as PyTorch does: not before one that follows a forward
// under NoSync. `model->` is the module itself, so names in its state do not change.
//
// Ranks may run different numbers of micro-batches, as in PyTorch, where an option says that it is
// no mistake:
//
//   DistributedDataParallel<Gpt> model(Gpt(config), mesh, {{.uneven_micro_batches = true}});
//   for (std::size_t i = 0; i < batches.size(); ++i) {
//     std::optional<NoSync> quiet;
//     if (i + 1 < batches.size()) quiet.emplace(model.module());
//     cross_entropy(model(batches[i].first), batches[i].second).backward();
//   }
//
// The gradient of a torch::nn::Embedding or EmbeddingBag with sparse(true) stays sparse, as in
// PyTorch, here and with replicate. It holds the rows that any rank used, and torch::optim::SGD
// takes it. A weight that other modules have too (tied) is reduced as a dense one.
//
//   torch::nn::Embedding table(torch::nn::EmbeddingOptions(50'000, 64).sparse(true));
//   DistributedDataParallel<torch::nn::Embedding> model(table, mesh);
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "tessera/deferred_init.h"
#include "tessera/fsdp.h"
#include "tessera/mesh.h"
#include "tessera/parameter.h"

namespace [[gnu::visibility("default")]] tessera {

namespace detail {
// Whether a forward of the unit of `module` begins a step: the one before it was not under NoSync.
// Ask once for each forward.
[[nodiscard]] bool begins_step(ModuleRef module);
}  // namespace detail

struct DistributedDataParallelOptions : ReplicateOptions {
  bool broadcast_buffers = true;
};

template <typename Holder>
class DistributedDataParallel {
 public:
  // Takes over `module`, a holder. Collective.
  DistributedDataParallel(Holder module, const Mesh& mesh,
                          const DistributedDataParallelOptions& options = {})
      : module_(std::move(module)), mesh_(mesh), broadcast_buffers_(options.broadcast_buffers) {
    materialize(this->module(), mesh_.device());
    sync_module_states(this->module(), mesh_);
    replicate(this->module(), mesh_, options);
    module_.take_units();
  }

  template <typename... Arguments>
  decltype(auto) operator()(Arguments&&... arguments) {
    if (broadcast_buffers_ && module()->is_training() && detail::begins_step(module()))
      sync_buffers(module(), mesh_);
    return call_module(module(), std::forward<Arguments>(arguments)...);
  }

  [[nodiscard]] Holder& module() noexcept { return module_.holder(); }
  auto* operator->() { return module_.holder().get(); }
  auto* operator->() const { return module_.holder().get(); }

  // Backward accumulates gradients on this rank while the returned object lives.
  [[nodiscard]] NoSync no_sync() const { return NoSync(module_.holder()); }

 private:
  detail::WrappedModule<Holder> module_;
  Mesh mesh_;
  bool broadcast_buffers_;
};

// Join: ranks that have different numbers of batches train together to the end.
//
//   Join join({model}, mesh);
//   std::size_t at = 0;
//   while (join.next(at < batches.size())) {
//     if (at < batches.size()) input = batches[at].first, target = batches[at++].second;
//     cross_entropy(model(input), target).backward();  // at the end the last batch again
//     optimizer.step();
//     optimizer.zero_grad();
//   }
//
// Every rank makes as many steps as the one with the most batches. A rank that has none left runs
// forward and backward with a stand-in, which counts nothing: its gradients are replaced by zeros.
// So it takes part in what the others gather and reduce, and its parameters stay theirs. It works
// with fully_shard, FullyShardedDataParallel and replicate alike, and with units of each.
//
// The stand-in may be any batch that the model takes, such as the last one. A rank that never has
// any input needs one too: zeros of the right shape and dtype. Its loss and gradients may be
// infinite or NaN, and it calls the same units as the batches of others. In SyncBatchNorm it does
// not count either. What it changes in other buffers (running statistics) is put back by the next
// call of `next`, or by restore_buffers(): call that before a save or an evaluation in the loop. So
// buffers are what each rank's own last batch left; sync_buffers() of tessera/fsdp.h gives all
// ranks rank 0's. Four things are the caller's:
// - The loss of a stand-in is a number like any other: leave it out of what is logged.
// - Where a loss takes tensors of other ranks (all_gather), a stand-in must be left out of it.
// - A parameter that no rank but those with a stand-in used gets a gradient of zeros, not none.
// - A model has one Join at a time.

// With the names of PyTorch's torch.distributed.algorithms.join.Join.
struct JoinOptions {
  // Gradients are divided by the number of all ranks. False: by the number of those that have
  // input, so that each batch weighs more when fewer ranks have one.
  bool divide_by_initial_world_size = true;
  // `next` throws `mismatch` on every rank when some have input and others have none.
  bool throw_on_early_termination = false;
};

class [[nodiscard]] Join {
 public:
  // For all parameters and buffers that `models` have now, sharded or to be sharded; they must
  // outlive this. `mesh`: all ranks that train them, of a HybridMesh `all`.
  Join(const std::vector<ModuleRef>& models, const Mesh& mesh, const JoinOptions& options = {});
  // Puts buffers back, too. From then on every batch counts.
  ~Join();
  Join(const Join&) = delete;
  Join& operator=(const Join&) = delete;

  // Whether any rank has input. What this rank runs backward until the next call counts if it has
  // some: one batch, or several that are accumulated. Call it between a step and the next forward.
  // Collective.
  [[nodiscard]] bool next(bool has_input);
  // Gives buffers the values from before this rank's stand-in. Local.
  void restore_buffers();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
