// Parts of tensors: what a rank holds of a unit's parameters, chunks of rows, and copies between
// arrays of them, as a plan of src/layout says.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include <torch/nn/module.h>
#include <torch/types.h>

#include "fsdp/unit/unit.h"
#include "tessera/layout.h"
#include "tessera/value.h"

namespace tessera::detail {

// Fills part `to` of the one-dimensional `to_array` from parts of `from_array`, of the same dtype.
// Throws `incomplete` where no part has an element.
void redistribute(const Shape& shape, const at::Tensor& from_array, std::span<const Part> from,
                  const at::Tensor& to_array, const Part& to);

// The part that `rank` holds of parameter `index` of a sharded unit, in its shard.
[[nodiscard]] inline const Part& part_of(const Unit& unit, std::size_t index, int rank) {
  return unit.layout().parts[rank][index];
}

// The chunk that torch.chunk gives `rank` of `world` of a tensor along dimension 0; sizes 0:
// nothing. Every rank gets all of one without dimensions.
[[nodiscard]] Box chunk_of(const Shape& shape, int world, int rank);
// `tensor` as the part `box` of a tensor of `shape` that is sharded; what holds nothing is no
// piece.
[[nodiscard]] Tensor chunk_leaf(const at::Tensor& tensor, const Shape& shape, const Box& box);
// The piece, a box in memory, as a tensor over that memory.
[[nodiscard]] at::Tensor tensor_of_piece(const Tensor& tensor, const Piece& piece);
// `piece`, but in the memory of `elements`.
[[nodiscard]] Piece piece_in(const Piece& piece, const at::Tensor& elements);

// What a state of parts brings to a model: planned and checked first, then moved.

// Whether a state and a module must have the same names. The module takes what a partial state has,
// and keeps the rest.
enum class Names : std::uint8_t { same, partial };

// Those of flat arrays: a rank holds other parts of them than chunks of rows, so their sharded kind
// is gathered.
[[nodiscard]] std::vector<std::shared_ptr<Unit>> units_without_chunks(
    const torch::nn::Module& module);

class ShardedLoad {
 public:
  // `state`: by the module's names, each rank's chunks. Throws `mismatch` naming an entry that is
  // missing, too many, or of another shape or part. Local.
  ShardedLoad(const torch::nn::Module& module, const Value& state, Names names);
  // The same for this rank's parts in `mine`, a tree over the memory that they are copied to.
  ShardedLoad(const Value& mine, const Value& state);
  // Collective if there are units without chunks. All ranks must then have the same names of a
  // partial state.
  void apply() const;

 private:
  struct Copy {
    at::Tensor to, from;
  };
  using Chunks =
      std::unordered_map<const c10::TensorImpl*, at::Tensor>;  // undefined: no part of it
  void plan(const std::string& name, const Tensor& mine, const Value& given);
  void take_chunks(const Unit& unit) const;
  [[nodiscard]] at::Tensor joined_chunks(const Unit& unit, const UnitLayout& rows) const;

  std::vector<Copy> copies_;
  std::vector<std::shared_ptr<Unit>> units_;  // without chunks
  Chunks chunks_;                             // of their parameters, by the module's tensor
};

}  // namespace tessera::detail
