// What one thread of a load does: a piece of one tensor, or a compressed chunk for all that want of
// it.
#pragma once

#include <cstddef>
#include <vector>

#include "checkpoint/load/fill.h"
#include "tessera/layout.h"

namespace tessera {

// One piece of one tensor that a load fills, or compares.

// Fills piece number `piece` of what `filling` wants, which is `of` or a part of it. If that is
// another key's memory, it is compared instead: throws `other_values` where it holds others than
// the checkpoint has.
void carry_out(const FillJob& job, const PieceOf& of, const Filling& filling, std::size_t piece);

// Compressed chunks of a checkpoint, each of which goes to all that a load wants of it in one pass.

// What pieces of one filling want of one of its chunks.
struct ChunkJob {
  struct Part {
    std::size_t piece = 0;  // of what is wanted
    Box box;                // of the tensor
  };
  std::size_t filling = 0;
  std::size_t chunk = 0;  // a piece of what is found
  std::vector<Part> parts = {};
};

// The jobs by which pieces `pieces` of a filling, in ascending order, get all that they want. Empty
// where no chunk is compressed, or where chunks have an element twice or not at all: then pieces
// are filled one by one.
[[nodiscard]] std::vector<ChunkJob> chunk_jobs(const std::vector<Filling>& fillings,
                                               std::size_t filling,
                                               const std::vector<std::size_t>& pieces);

// Fills these parts; those of pieces that are another key's memory are compared with it instead.
void carry_out(const FillJob& job, const ChunkJob& chunk);

}  // namespace tessera
