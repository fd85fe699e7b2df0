// Communication hooks: another way to average a unit's gradients.
//
//   FullyShardedDataParallel<Gpt> model(Gpt(config), mesh);
//   model.register_comm_hook(bf16_compress_hook(mesh));
#pragma once

#include <torch/types.h>

#include <functional>

#include "tessera/mesh.h"

namespace [[gnu::visibility("default")]] tessera {

// Called on every rank in the same order, once per unit and backward, instead of FSDP's own
// reduction and division. `gradient` is one-dimensional, and the hook may change it. If parameters
// are sharded, it holds the parts of all ranks end to end, and the hook writes to `shard` (1/N of
// its size) what this rank's part should be. If they are whole (NO_SHARD), `shard` is undefined,
// and the hook works in place. A rank without a gradient for a parameter gives zeros. Nothing else
// runs while a hook does: it may communicate as it likes, alike on every rank. It may not hold a
// copy of the mesh, because the mesh owns the units that hold the hook.
using CommHook = std::function<void(torch::Tensor& gradient, torch::Tensor& shard)>;

// Averages over the ranks of `mesh`, as without a hook: PyTorch's allreduce_hook and
// reduce_scatter_hook. The mesh must outlive training with it.
[[nodiscard]] CommHook average_hook(const Mesh& mesh);
// The same, but gradients travel, and are summed, in a shorter type.
[[nodiscard]] CommHook fp16_compress_hook(const Mesh& mesh);
[[nodiscard]] CommHook bf16_compress_hook(const Mesh& mesh);

}  // namespace tessera
