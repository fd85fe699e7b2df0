// The exact runs that turn one arrangement of a tensor's elements into another, and the proofs that
// they fill it.
//
// Pure integers: no I/O, no ranks, no libtorch. All counts are elements. An index into a whole
// tensor is its row-major ("global") position. Every function that combines numbers throws `limit`
// on overflow of 64 bits instead of wrapping.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "tessera/layout.h"

#pragma GCC visibility push(default)  // the command links it, see cmake/TesseraShared.cmake
namespace tessera {

// `count` elements at global position `global`, which are the slice's own elements from `local` on
// (its row-major order).
struct Run {
  std::int64_t global = 0;
  std::int64_t local = 0;
  std::int64_t count = 0;
  bool operator==(const Run&) const = default;
};

// A slice as the ascending sequence of its maximal global runs: the common language of boxes and
// flat ranges. Two slices of one tensor are intersected by merging their sequences.
class RunSequence {
 public:
  // `slice` must lie inside `shape`.
  RunSequence(const Slice& slice, const Shape& shape);
  [[nodiscard]] std::int64_t size() const noexcept { return count_; }  // number of runs
  [[nodiscard]] Run operator[](std::int64_t index) const;
  // Index of the first run that ends after global position `global`; size() when there is none.
  [[nodiscard]] std::int64_t first_ending_after(std::int64_t global) const;

 private:
  Shape outer_sizes_;        // sizes of the dimensions that separate runs, outermost first
  Shape outer_strides_;      // their global strides
  std::int64_t base_ = 0;    // global position of the first run
  std::int64_t length_ = 0;  // elements a run
  std::int64_t count_ = 0;   // runs
};

// `count` elements go from element `from_local` of piece `from` to element `to_local` of piece
// `to`.
struct Copy {
  std::size_t from = 0;
  std::size_t to = 0;
  std::int64_t from_local = 0;
  std::int64_t to_local = 0;
  std::int64_t count = 0;
  bool operator==(const Copy&) const = default;
};

// The runs that fill every piece of `to` from the pieces of `from`, both slices of a tensor of
// `shape`. The piece of `from` with the lowest index serves where several overlap (replicas).
// Sorted by `to`, then by `to_local`. Elements of `to` that no piece of `from` holds are absent:
// see `require_covered`.
[[nodiscard]] std::vector<Copy> plan_copies(const Shape& shape, std::span<const Slice> from,
                                            std::span<const Slice> to);

// Proof that a plan fills every element of every piece of `to`. Throws `incomplete` naming the
// first element that nothing fills.
void require_filled(const Shape& shape, std::span<const Slice> to, std::span<const Copy> plan);

// Proof that `pieces` hold every element of a tensor of `shape` exactly once. Throws `incomplete`
// for a hole and `conflict` for an overlap, naming the first element concerned.
void require_covered_once(const Shape& shape, std::span<const Slice> pieces);
// The same of a part of them: there may be holes.
void require_apart(const Shape& shape, std::span<const Slice> pieces);

}  // namespace tessera
#pragma GCC visibility pop
