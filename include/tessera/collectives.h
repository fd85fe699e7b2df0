// Collectives of tensors for programs: torch.distributed's all_gather, broadcast and barrier over
// the ranks of a Mesh. Sums are Mesh::all_reduce_sum.
//
//   auto all = torch::cat(all_gather(x, mesh));  // x may require a gradient
//   broadcast(target, 0, mesh);
//   barrier(mesh);
//
// All ranks make the same calls in the same order, also in the backward, on the thread that uses
// the mesh. Tensors are dense, on the mesh's device or on the CPU, of any dtype, and have the same
// shape and dtype on every rank. A mesh of one rank is right too: then nothing travels.
//
// Each throws `invalid_argument` for an undefined tensor or a rank that is none, `unsupported` for
// a sparse tensor. `mismatch`: the ranks called different things, or gave other shapes or dtypes;
// where NCCL carries the tensors that is not compared, and must not happen. `timeout` or
// `peer_failed`: the peers do not answer.
#pragma once

#include <torch/types.h>

#include <vector>

#include "tessera/mesh.h"

namespace [[gnu::visibility("default")]] tessera {

// The tensors of all ranks, in rank order, in memory of their own. Where `tensor` requires a
// gradient they have a history: in the backward each rank gets the sum of what all ranks have done
// with its tensor. So either all ranks ask for gradients and go backward through the results, or
// none does; one that uses only some of them takes part all the same. Gradients of gradients work.
[[nodiscard]] std::vector<torch::Tensor> all_gather(const torch::Tensor& tensor, const Mesh& mesh);

// Gives `tensor` on every rank the values that it has on rank `src`, in place and without history.
void broadcast(const torch::Tensor& tensor, int src, const Mesh& mesh);

// Returns when every rank has called it. What a device has still to do is not waited for.
void barrier(const Mesh& mesh);

}  // namespace tessera
