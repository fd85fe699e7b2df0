// One piece of one tensor that a load fills, or compares.
#pragma once

#include <cstddef>

#include "checkpoint/load/fill.h"

namespace tessera {

// Fills piece number `piece` of what `filling` wants, which is `of` or a part of it. If that is
// another key's memory, it is compared instead: throws `other_values` where it holds others than
// the checkpoint has.
void carry_out(const FillJob& job, const PieceOf& of, const Filling& filling, std::size_t piece);

}  // namespace tessera
