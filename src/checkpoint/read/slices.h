// Slices as people type them behind a name: "embed[0:10]".
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/layout.h"
#include "tessera/leaf.h"

#pragma GCC visibility push(default)  // the command links it, see cmake/TesseraShared.cmake
namespace tessera {

// What becomes of a range that reaches outside of its dimension.
enum class Outside : std::uint8_t {
  cut,     // as Python cuts it
  refuse,  // `invalid_argument` with the slice and the shape
};

// "[0:2,:3]" as a box, one range a dimension from the first on; empty: all. Negative numbers count
// from the end, and a single number keeps its dimension with one element. Throws `invalid_argument`
// for anything else, and for a single number outside of the shape.
[[nodiscard]] Box box_of(const std::string& slices, const Shape& shape, Outside outside);

}  // namespace tessera
#pragma GCC visibility pop

namespace tessera {

// Replaces each tensor that a rule "NAME[SLICES]" names by its slice, which is read when it is
// converted; a checksum of all its bytes is compared then, too. Throws `not_found` for a name that
// no leaf has, with one that is near, `mismatch` for one of no tensor, and `invalid_argument` for a
// rule without a slice, a second one for a name, and a slice that is empty or reaches outside.
void slice(std::vector<Leaf>& leaves, const std::vector<std::string>& rules,
           const std::string& path);

}  // namespace tessera
