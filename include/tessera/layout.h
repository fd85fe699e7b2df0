// Which part of which tensor lives where, and the exact runs that turn one arrangement into
// another.
//
// Pure integers: no I/O, no ranks, no libtorch. All counts are elements unless a name says bytes.
// An index into a whole tensor is its row-major ("global") position. Every function that combines
// numbers throws `limit` on overflow of 64 bits instead of wrapping.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "tessera/dtype.h"

namespace tessera {

using Shape = std::vector<std::int64_t>;  // sizes, outermost first; empty: a scalar of one element

// Product of the sizes; throws `limit` on overflow and `corrupt` on a negative size.
[[nodiscard]] std::int64_t numel(const Shape& shape);
// Bytes of a dense tensor; throws as numel does.
[[nodiscard]] std::uint64_t byte_size(DType dtype, const Shape& shape);
[[nodiscard]] std::string to_string(const Shape& shape);  // "[3, 4]"
// Row-major strides of `shape`.
[[nodiscard]] Shape contiguous_strides(const Shape& shape);

// A rectangle of a tensor: `sizes[d]` elements from `offsets[d]` in each dimension.
struct Box {
  Shape offsets;
  Shape sizes;
  bool operator==(const Box&) const = default;
};

// Elements [begin, end) of a tensor in row-major order, as FSDP1 shards hold them.
struct FlatRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  bool operator==(const FlatRange&) const = default;
};

using Slice = std::variant<Box, FlatRange>;

[[nodiscard]] Box whole(const Shape& shape);
[[nodiscard]] std::int64_t numel(const Slice& slice);
[[nodiscard]] std::string to_string(const Slice& slice);
// Throws `corrupt` naming both when the slice does not lie inside `shape`.
void require_inside(const Slice& slice, const Shape& shape);

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
// `shape`. Where pieces of `from` overlap (replicas) the one with the lowest index serves. Sorted
// by `to`, then by `to_local`. Elements of `to` that no piece of `from` holds are absent: see
// `require_covered`.
[[nodiscard]] std::vector<Copy> plan_copies(const Shape& shape, std::span<const Slice> from,
                                            std::span<const Slice> to);

// Proof that a plan fills every element of every piece of `to`. Throws `incomplete` naming the
// first element that nothing fills.
void require_filled(const Shape& shape, std::span<const Slice> to, std::span<const Copy> plan);

// Proof that `pieces` hold every element of a tensor of `shape` exactly once. Throws `incomplete`
// for a hole and `conflict` for an overlap, naming the first element concerned.
void require_covered_once(const Shape& shape, std::span<const Slice> pieces);

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

}  // namespace tessera
