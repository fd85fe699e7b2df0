// One piece of one tensor that a load fills, or compares.
#pragma once

#include <cstddef>
#include <string>

#include "checkpoint/load/fill.h"

namespace tessera {

// Fills piece number `piece` of what is wanted.
void fill_piece(const FillJob& job, const Filling& filling, std::size_t piece);

// Compares it instead. Throws `other_values` where it holds others than the checkpoint has.
void compare_piece(const FillJob& job, const Filling& filling, std::size_t piece,
                   const std::string& owner);

}  // namespace tessera
