#include "checkpoint/read/reader_source.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <unordered_map>

#include "checkpoint/read/reader.h"
#include "layout/boxes.h"

namespace tessera {
namespace {

constexpr std::size_t kBuckets =
    static_cast<std::size_t>(std::bit_width(std::uint64_t{kSpanBytes}));

// The runs that a plan reads of one piece.
struct PieceRuns {
  std::int64_t end = -1;    // of the run before, in elements
  std::int64_t needed = 0;  // elements
  // Elements in gaps whose length in bytes has so many bits.
  std::array<std::int64_t, kBuckets> gaps{};
};

// `bytes`: of an element.
std::unordered_map<std::size_t, PieceRuns> runs_by_piece(std::span<const Copy> plan,
                                                         std::int64_t bytes) {
  std::unordered_map<std::size_t, PieceRuns> by_piece;
  for (const Copy& copy : plan) {
    PieceRuns& runs = by_piece[copy.from];
    const std::int64_t gap = runs.end < 0 ? 0 : copy.from_local - runs.end;
    if (gap > 0 && gap * bytes < kSpanBytes)
      runs.gaps[static_cast<std::size_t>(
          std::bit_width(static_cast<std::uint64_t>(gap * bytes)))] += gap;
    runs.end = copy.from_local + copy.count;
    runs.needed += copy.count;
  }
  return by_piece;
}

// The longest gap, in bytes, such that all up to it together are worth reading over.
std::int64_t longest_worth_reading(const PieceRuns& runs) {
  std::int64_t over = 0;
  std::size_t bits = 0;
  while (bits + 1 < kBuckets) {
    over += runs.gaps[bits + 1];
    if (over * kNeededPerGapByte > runs.needed) break;
    ++bits;
  }
  return (std::int64_t{1} << bits) - 1;
}

}  // namespace

std::vector<std::int64_t> gaps_to_close(std::span<const Copy> plan,
                                        std::span<const std::int64_t> free, std::size_t element) {
  const auto bytes = static_cast<std::int64_t>(element);
  std::vector<std::int64_t> closed(free.begin(), free.end());
  for (std::int64_t& gap : closed) gap /= bytes;
  for (const auto& [piece, runs] : runs_by_piece(plan, bytes))
    closed[piece] = std::max(closed[piece], longest_worth_reading(runs) / bytes);
  return closed;
}

// Pieces whose elements do not lie densely in row-major order: views that are transposed, sliced or
// expanded.

namespace {

// The array that row-major positions of a slice count in.
const Shape& shape_of(const Slice& slice, const Shape& tensor) {
  const Box* box = std::get_if<Box>(&slice);
  return box != nullptr ? box->sizes : tensor;
}

// Element 0 of the slice in that array, row-major.
std::int64_t first_of(const Slice& slice) {
  const FlatRange* range = std::get_if<FlatRange>(&slice);
  return range != nullptr ? range->begin : 0;
}

Shape zeros(const Shape& shape) {
  return Shape(shape.size(), 0);
}

std::int64_t count_common(const Box& a, const Box& b) {
  const auto both = common_box(a, b);
  return both ? numel(both->sizes) : 0;
}

}  // namespace

// Up to a whole number of rows of the widest kind that fit into a tile: parts of a row would be
// read from the file an element at a time.
std::int64_t TensorReader::tile_end(std::int64_t begin) const {
  const std::int64_t end = numel(*planned_);
  const auto room = static_cast<std::int64_t>(std::max<std::size_t>(tile_bytes_ / element_, 1));
  if (end - begin <= room) return end;
  const std::int64_t first = first_of(*planned_);
  for (const std::int64_t row : contiguous_strides(shape_of(*planned_, tensor_.shape))) {
    const std::int64_t whole_rows = row == 0 ? 0 : (first + begin + room) / row * row - first;
    if (row <= room && whole_rows > begin) return whole_rows;
  }
  return begin + room;
}

void TensorReader::fill_tile(std::int64_t begin, std::int64_t end) {
  tile_.begin = tile_.end = 0;  // should the reading fail
  if (!tile_.bytes) {
    const auto all = static_cast<std::size_t>(numel(*planned_)) * element_;
    tile_.bytes =
        std::make_unique_for_overwrite<std::byte[]>(std::min(std::max(tile_bytes_, element_), all));
  }
  read_window(begin, end - begin, tile_.bytes.get());
  tile_.begin = begin;
  tile_.end = end;
}

void TensorReader::read_tiled(std::int64_t begin, std::int64_t count, std::byte* out) {
  while (count > 0) {
    if (begin < tile_.begin || begin >= tile_.end) {
      const std::int64_t end = tile_end(begin);
      if (count >= end - begin) return read_window(begin, count, out);
      fill_tile(begin, end);
    }
    const std::int64_t part = std::min(count, tile_.end - begin);
    const std::size_t size = static_cast<std::size_t>(part) * element_;
    std::memcpy(out, tile_.bytes.get() + static_cast<std::size_t>(begin - tile_.begin) * element_,
                size);
    out += size;
    begin += part;
    count -= part;
    // Readers may live as long as a checkpoint.
    if (begin == numel(*planned_)) tile_ = {};
  }
}

// Whether the plan takes all that the piece and the target have in common from this piece, none of
// it from a replica.
bool TensorReader::takes_all_common(std::size_t piece) const {
  const Box* box = std::get_if<Box>(&slices_[piece]);
  if (box == nullptr) return false;
  std::int64_t common = 0;
  if (const FlatRange* range = std::get_if<FlatRange>(&*planned_)) {
    for (const Box& part : boxes_of(*range, tensor_.shape)) common += count_common(part, *box);
  } else {
    common = count_common(std::get<Box>(*planned_), *box);
  }
  return taken_[piece] == common;
}

// What the plan takes of a piece whose elements partly come from a replica.
void TensorReader::read_copies(Source& source, std::span<const Copy> copies, std::int64_t begin,
                               std::byte* out) {
  const Shape dense = contiguous_strides(source.sizes);
  for (const Copy& copy : copies) {
    const FlatRange range{copy.from_local, copy.from_local + copy.count};
    for (const Box& box : boxes_of(range, source.sizes))
      read_box(source, box, dense, copy.to_local - begin - copy.from_local, out);
  }
}

void TensorReader::read_strided(Source& source, std::span<const Copy> copies, std::int64_t begin,
                                std::int64_t count, std::byte* out) {
  const std::size_t piece = copies.front().from;
  if (!source.takes_all) source.takes_all = takes_all_common(piece);
  if (!*source.takes_all) return read_copies(source, copies, begin, out);
  // The window of the target as boxes, and what of each lies in the piece.
  const Box& mine = std::get<Box>(slices_[piece]);
  const Box* target = std::get_if<Box>(&*planned_);
  const Shape& shape = shape_of(*planned_, tensor_.shape);
  const Shape origin = target != nullptr ? target->offsets : zeros(shape);
  const Shape strides = contiguous_strides(shape);
  const std::int64_t first = first_of(*planned_) + begin;
  for (Box& box : boxes_of({first, first + count}, shape)) {
    for (std::size_t d = 0; d < shape.size(); ++d) box.offsets[d] += origin[d];
    auto common = common_box(box, mine);
    if (!common) continue;
    std::int64_t to = -first;
    for (std::size_t d = 0; d < shape.size(); ++d) {
      to += (mine.offsets[d] - origin[d]) * strides[d];
      common->offsets[d] -= mine.offsets[d];
    }
    read_box(source, *common, strides, to, out);
  }
}

// The elements of `box`, a part of the piece's own array: the one with index i goes to element
// `first` + sum of i[d] * strides[d] of `out`.
void TensorReader::read_box(Source& source, const Box& box, const Shape& strides,
                            std::int64_t first, std::byte* out) {
  StridedMove move = move_of(box, source.piece.strides, strides, first);
  const Storage& storage = *source.piece.storage;
  if (storage.data != nullptr) {
    copy_strided(normalized(std::move(move)), storage.data + source.first_byte, out, element_);
    return;
  }
  const auto copy_out = [&](std::span<ReadRange> ranges) { source.device->read_ranges(ranges); };
  if (source.device) return gather(move, element_, source.first_byte, copy_out, out, gather_);
  const auto read = [&](std::span<ReadRange> ranges) {
    for (ReadRange& range : ranges) range.offset += storage.offset;
    storage.source->read_ranges(ranges);
    for (const ReadRange& range : ranges) {
      source.read += range.out.size();
      source.follow(range.offset - storage.offset, range.out, name_);
    }
  };
  gather(move, element_, source.first_byte, read, out, gather_);
}

}  // namespace tessera
