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

#include <utility>

#include "tessera/deferred_init.h"
#include "tessera/fsdp.h"

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

  // While the returned object lives, backward accumulates gradients on this rank.
  [[nodiscard]] NoSync no_sync() const { return NoSync(module_.holder()); }

 private:
  detail::WrappedModule<Holder> module_;
  Mesh mesh_;
  bool broadcast_buffers_;
};

}  // namespace tessera
