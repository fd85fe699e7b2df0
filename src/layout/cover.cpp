// Proof that pieces hold every element exactly once, or at most once.
//
// All pieces become boxes; a flat range is at most 2 * dims - 1 of them. Along the first dimension
// the edges of the boxes cut the tensor into slabs inside which the set of boxes does not change,
// so each slab is judged by its first row, in the remaining dimensions. Slabs come in ascending
// order: the first fault found is the first in row-major order. The work depends on the number of
// pieces, never on the number of rows.
#include <algorithm>
#include <numeric>
#include <utility>

#include "base/checked.h"
#include "layout/element.h"
#include "layout/plan.h"
#include "tessera/layout.h"

namespace tessera {
namespace {

class Cover {
 public:
  Cover(const Shape& shape, bool has_holes) : shape_(shape), has_holes_(has_holes) {
    const Shape strides = contiguous_strides(shape);
    for (std::size_t d = 0; d < shape.size(); ++d) {
      if (shape[d] == 1) continue;
      axes_.push_back(d);
      sizes_.push_back(shape[d]);
      strides_.push_back(strides[d]);
    }
  }

  void add(const Slice& slice, std::size_t piece) {
    if (numel(slice) == 0) return;
    Box box = whole(sizes_);
    if (const FlatRange* range = std::get_if<FlatRange>(&slice)) {
      add_range(std::move(box), range->begin, range->end, 0, piece);
      return;
    }
    for (std::size_t d = 0; d < axes_.size(); ++d) {
      box.offsets[d] = std::get<Box>(slice).offsets[axes_[d]];
      box.sizes[d] = std::get<Box>(slice).sizes[axes_[d]];
    }
    add_box(std::move(box), piece);
  }

  void prove() const {
    std::vector<std::size_t> all(boxes_.size());
    std::iota(all.begin(), all.end(), std::size_t{0});
    check(0, 0, std::move(all));
  }

 private:
  // Inside one row of each dimension before `d`, the elements [begin, end) of the remaining ones: a
  // partial first row, whole rows, a partial last row.
  void add_range(Box box, std::int64_t begin, std::int64_t end, std::size_t d, std::size_t piece) {
    if (d == sizes_.size()) return add_box(std::move(box), piece);
    const std::int64_t stride = strides_[d];
    const auto add_row = [&](std::int64_t row, std::int64_t from, std::int64_t to) {
      Box rest = box;
      rest.offsets[d] = row;
      rest.sizes[d] = 1;
      add_range(std::move(rest), from, to, d + 1, piece);
    };
    const std::int64_t first = begin / stride;
    const std::int64_t last = end / stride;
    if (first == last) return add_row(first, begin % stride, end % stride);
    const std::int64_t first_whole = begin % stride == 0 ? first : first + 1;
    if (first_whole > first) add_row(first, begin % stride, stride);
    if (end % stride != 0) add_row(last, 0, end % stride);
    if (first_whole < last) {
      box.offsets[d] = first_whole;
      box.sizes[d] = last - first_whole;
      add_box(std::move(box), piece);
    }
  }

  void add_box(Box box, std::size_t piece) {
    boxes_.push_back(std::move(box));
    pieces_.push_back(piece);
  }

  // `here` are the boxes that hold the row at global position `position` of the dimensions before
  // `d`.
  void check(std::size_t d, std::int64_t position, std::vector<std::size_t> here) const {
    if (here.empty()) {
      if (has_holes_) return;
      throw Error(ErrorCode::incomplete, element_name(shape_, position) + " is in no piece");
    }
    if (d == sizes_.size()) {
      if (here.size() > 1) refuse_overlap(position, here);
      return;
    }
    const std::vector<std::int64_t> cuts = cuts_of(here, d);
    std::sort(here.begin(), here.end(),
              [&](std::size_t a, std::size_t b) { return begin_of(a, d) < begin_of(b, d); });
    std::vector<std::size_t> active;
    auto next = here.begin();
    for (const std::int64_t cut : cuts) {
      std::erase_if(active, [&](std::size_t box) { return end_of(box, d) <= cut; });
      for (; next != here.end() && begin_of(*next, d) <= cut; ++next) active.push_back(*next);
      check(d + 1, position + cut * strides_[d], active);
    }
  }

  [[nodiscard]] std::int64_t begin_of(std::size_t box, std::size_t d) const {
    return boxes_[box].offsets[d];
  }
  [[nodiscard]] std::int64_t end_of(std::size_t box, std::size_t d) const {
    return begin_of(box, d) + boxes_[box].sizes[d];
  }

  // Where slabs begin along dimension `d`, ascending.
  [[nodiscard]] std::vector<std::int64_t> cuts_of(std::span<const std::size_t> boxes,
                                                  std::size_t d) const {
    std::vector<std::int64_t> cuts{0};
    for (const std::size_t box : boxes) {
      cuts.push_back(begin_of(box, d));
      if (end_of(box, d) < sizes_[d]) cuts.push_back(end_of(box, d));
    }
    std::sort(cuts.begin(), cuts.end());
    cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
    return cuts;
  }

  [[noreturn]] void refuse_overlap(std::int64_t position, std::span<const std::size_t> here) const {
    std::vector<std::size_t> holders(here.size());
    std::transform(here.begin(), here.end(), holders.begin(),
                   [this](std::size_t box) { return pieces_[box]; });
    std::sort(holders.begin(), holders.end());
    throw Error(ErrorCode::conflict, element_name(shape_, position) + " is in piece " +
                                         std::to_string(holders[0]) + " and in piece " +
                                         std::to_string(holders[1]));
  }

  // Dimensions of size 1 separate nothing and are left out; at most 62 remain, which bounds
  // recursion.
  const Shape& shape_;
  bool has_holes_;                   // that is no fault
  std::vector<std::size_t> axes_;    // the dimensions kept
  Shape sizes_;                      // their sizes
  Shape strides_;                    // and global strides
  std::vector<Box> boxes_;           // non-empty
  std::vector<std::size_t> pieces_;  // which piece each box is of
};

// A box that is all of the tensor, as nearly every tensor of a file has it.
bool is_whole(const Slice& piece, const Shape& shape) {
  const Box* const box = std::get_if<Box>(&piece);
  return box != nullptr && box->sizes == shape &&
         std::ranges::count(box->offsets, 0) == std::ssize(shape);
}

void prove(const Shape& shape, std::span<const Slice> pieces, bool has_holes) {
  for (const Slice& piece : pieces) require_inside(piece, shape);
  if (numel(shape) == 0 || (pieces.size() == 1 && is_whole(pieces[0], shape))) return;
  Cover cover(shape, has_holes);
  for (std::size_t i = 0; i < pieces.size(); ++i) cover.add(pieces[i], i);
  cover.prove();
}

}  // namespace

void require_covered_once(const Shape& shape, std::span<const Slice> pieces) {
  prove(shape, pieces, false);
}

void require_apart(const Shape& shape, std::span<const Slice> pieces) {
  if (pieces.size() > 1) prove(shape, pieces, true);
}

}  // namespace tessera
