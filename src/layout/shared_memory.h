// Whether two arrays with strides have a byte in common.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tessera/layout.h"

namespace tessera {

// The bytes of an array: those at `address` plus, for each step, a multiple of `stride` below
// `count`. By ascending stride; the first step's is 1, and no step continues the one before it, so
// a dense array has one step.
struct BytePattern {
  struct Step {
    std::int64_t stride = 1;
    std::int64_t count = 1;
  };
  std::uint64_t address = 0;
  std::vector<Step> steps;  // empty: the array has no elements
};

// Of elements of `element` bytes, the first at `address`, the others at strides that are counted in
// elements and not negative.
[[nodiscard]] BytePattern bytes_of_array(std::uint64_t address, std::size_t element,
                                         const Shape& sizes, const Shape& strides);

// Exact for any two arrays whose elements are apart. Where the strides are those of one matrix the
// work depends on the number of dimensions alone, else on that of the runs of bytes at most. An
// array that has a stride shorter than what lies within one step of it may take 8 bytes for each of
// its runs; no other takes memory.
[[nodiscard]] bool share_memory(const BytePattern& a, const BytePattern& b);

}  // namespace tessera
