// Copies of arrays whose elements lie at strides, within memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace tessera {

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
