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
#pragma once

#include <memory>
#include <vector>

#include "tessera/mesh.h"
#include "tessera/module_ref.h"

namespace [[gnu::visibility("default")]] tessera {

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
