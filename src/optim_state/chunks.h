// Tensors of which every rank has its pieces: what all ranks have, and how it comes together.
#pragma once

#include <torch/types.h>

#include <vector>

#include "fsdp/state/sharded_load.h"
#include "tessera/mesh.h"
#include "tessera/value.h"

namespace tessera::detail {

// One tensor as every rank has it, from the ranks' descriptions (state_message.h).
using Scattered = std::vector<const Tensor*>;  // [rank]; null: nothing

// The places of the pieces of several tensors of one dtype in an array of what every rank gives,
// one rank after the other.
class ChunkArray {
 public:
  // Throws `mismatch` where ranks have different shapes or dtypes.
  explicit ChunkArray(std::vector<Scattered> tensors);
  // The elements that `rank` gives: its own pieces of `held`, which are in memory, in the order of
  // the tensors.
  [[nodiscard]] at::Tensor give(int rank, const std::vector<const Tensor*>& held) const;
  // The parts of tensor `index` in the array of all.
  [[nodiscard]] std::vector<Part> parts(std::size_t index) const;
  // The same in what `rank` gives.
  [[nodiscard]] std::vector<Part> own_parts(std::size_t index, int rank) const;

 private:
  void place_parts_of(std::size_t rank);

  std::vector<Scattered> tensors_;
  std::vector<std::vector<std::int64_t>> bases_;  // [rank][tensor] in what the rank gives
  std::int64_t elements_ = 0;                     // that a rank gives
  DType dtype_ = DType::float32;
};

// The elements that every rank gives, one after the other: one-dimensional, of the same size and
// dtype on all. Collective.
[[nodiscard]] at::Tensor exchange_over(const Mesh& mesh, const at::Tensor& mine);
// Rank 0's values in the place of the others', all on the CPU. Collective.
void broadcast_over(const Mesh& mesh, std::vector<at::Tensor>& tensors);

}  // namespace tessera::detail
