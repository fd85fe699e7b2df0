// Arrays with strides, in elements: where their bytes are, whether two share one, and copies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "tessera/layout.h"

namespace tessera {

// Arrays with strides, in elements.

// Elements between the first of an array with these sizes and strides and one past its last: 0 when
// it has none. Throws `invalid_argument` when sizes and strides are not equally many or one of them
// is negative.
[[nodiscard]] std::int64_t strided_reach(const Shape& sizes, const Shape& strides);

// Calls `visit(position, count)` for the maximal runs of `count` elements with stride 1 that make
// up elements [begin, begin + count) (row-major) of an array with these sizes and strides;
// `position` is the element offset from the array's first element.
void for_each_strided_run(
    const Shape& sizes, const Shape& strides, std::int64_t begin, std::int64_t count,
    const std::function<void(std::int64_t position, std::int64_t count)>& visit);

// Whether two arrays with strides have a byte in common.

// The bytes of an array: those at `address` plus, for each step, a multiple of `stride` below
// `count`. The steps are sorted by ascending stride; the first step's is 1, and no step continues
// the one before it, so a dense array has one step.
struct BytePattern {
  struct Step {
    std::int64_t stride = 1;
    std::int64_t count = 1;
  };
  std::uint64_t address = 0;
  std::vector<Step> steps;  // empty: the array has no elements
};

// The bytes of elements of `element` bytes, the first at `address`, the others at strides that are
// counted in elements and not negative.
[[nodiscard]] BytePattern bytes_of_array(std::uint64_t address, std::size_t element,
                                         const Shape& sizes, const Shape& strides);

// Exact for any two arrays whose elements are apart. The work depends on the number of dimensions
// alone if the strides are those of one matrix, else on that of the runs of bytes at most. An array
// that has a stride shorter than what lies within one step of it may take 8 bytes for each of its
// runs; no other takes memory.
[[nodiscard]] bool share_memory(const BytePattern& a, const BytePattern& b);

// Copies of arrays whose elements lie at strides, within memory.

// One dimension of an array that lies in two places. Strides are elements.
struct StridedDim {
  std::int64_t size = 0;
  std::int64_t from = 0;  // stride where it is read
  std::int64_t to = 0;    // stride where it is written
  bool operator==(const StridedDim&) const = default;
};

// The element with index i[d] goes from position `from` + sum of i[d] * dims[d].from to position
// `to` + sum of i[d] * dims[d].to.
struct StridedMove {
  std::int64_t from = 0;
  std::int64_t to = 0;
  std::vector<StridedDim> dims;
};

// Goes through the indices of `dims`, the last one first. The dimensions must outlive it.
class StridedWalk {
 public:
  StridedWalk(std::span<const StridedDim> dims, std::int64_t first_from, std::int64_t first_to)
      : from(first_from), to(first_to), dims_(dims), index_(dims.size()) {}

  std::int64_t from;  // the positions of the index that the walk is at; index 0 at first
  std::int64_t to;
  // To the next index; false after the last one.
  bool next();

 private:
  std::span<const StridedDim> dims_;
  std::vector<std::int64_t> index_;
};

// The same move in the fewest dimensions and in the order of what is read: no dimension of one
// element, no negative stride of reading, larger strides of reading first and those of 0, which
// repeat elements, last; dimensions that continue each other on both sides are one. None of the
// sizes may be 0.
[[nodiscard]] StridedMove normalized(StridedMove move);

// Carries out a normalized move of elements of `element` bytes. Works in blocks that fit into the
// cache, so that a transposition costs about as much as a copy. The two places must not overlap;
// no alignment is needed.
void copy_strided(const StridedMove& move, const std::byte* from, std::byte* to,
                  std::size_t element);

}  // namespace tessera
