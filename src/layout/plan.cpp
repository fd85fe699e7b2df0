#include "layout/plan.h"

#include <algorithm>
#include <numeric>
#include <queue>
#include <tuple>
#include <utility>

#include "base/numbers.h"
#include "layout/boxes.h"
#include "tessera/error.h"
#include "tessera/layout.h"

namespace tessera {
namespace {

// The stretch of global positions that a slice touches; empty when begin == end.
struct Extent {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

Extent extent_of(const RunSequence& runs) {
  if (runs.size() == 0) return {};
  const Run last = runs[runs.size() - 1];
  return {runs[0].global, last.global + last.count};
}

bool ends_before(const Box& a, const Box& b, std::size_t d) {
  return a.offsets[d] + a.sizes[d] <= b.offsets[d];
}

bool boxes_are_apart(const Slice& a, const Slice& b) {
  const Box* box_a = std::get_if<Box>(&a);
  const Box* box_b = std::get_if<Box>(&b);
  if (box_a == nullptr || box_b == nullptr) return false;
  for (std::size_t d = 0; d < box_a->offsets.size(); ++d) {
    if (ends_before(*box_a, *box_b, d) || ends_before(*box_b, *box_a, d)) return true;
  }
  return false;
}

// Any total order: it only brings equal slices together.
bool comes_before(const Slice& a, const Slice& b) {
  if (a.index() != b.index()) return a.index() < b.index();
  if (const Box* box = std::get_if<Box>(&a)) {
    const Box& other = std::get<Box>(b);
    return std::tie(box->offsets, box->sizes) < std::tie(other.offsets, other.sizes);
  }
  const FlatRange& range = std::get<FlatRange>(a);
  const FlatRange& other = std::get<FlatRange>(b);
  return std::tie(range.begin, range.end) < std::tie(other.begin, other.end);
}

// Indices of the slices, without those that equal an earlier one.
std::vector<std::size_t> distinct(std::span<const Slice> slices) {
  std::vector<std::size_t> order(slices.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return comes_before(slices[a], slices[b]);
  });
  const auto same = [&](std::size_t a, std::size_t b) { return slices[a] == slices[b]; };
  order.erase(std::unique(order.begin(), order.end(), same), order.end());
  return order;
}

struct Source {
  std::size_t index;  // in the caller's list
  RunSequence runs;
  Extent extent;
};

// Sources ordered by where they begin, so that each target looks at its neighbours only.
class Sources {
 public:
  Sources(const Shape& shape, std::span<const Slice> slices) {
    for (const std::size_t index : distinct(slices)) {
      RunSequence runs(slices[index], shape);
      const Extent extent = extent_of(runs);
      if (runs.size() > 0) sources_.push_back({index, std::move(runs), extent});
    }
    std::sort(sources_.begin(), sources_.end(), [](const Source& a, const Source& b) {
      return std::tie(a.extent.begin, a.index) < std::tie(b.extent.begin, b.index);
    });
    std::int64_t furthest = 0;
    for (const Source& source : sources_) {
      furthest = std::max(furthest, source.extent.end);
      furthest_end_.push_back(furthest);
    }
  }

  // Calls `visit` for the sources whose extent overlaps `extent`.
  template <typename Visit>
  void near(Extent extent, Visit visit) const {
    const auto first = std::upper_bound(furthest_end_.begin(), furthest_end_.end(), extent.begin);
    for (auto i = static_cast<std::size_t>(first - furthest_end_.begin()); i < sources_.size();
         ++i) {
      if (sources_[i].extent.begin >= extent.end) return;
      if (sources_[i].extent.end > extent.begin) visit(sources_[i]);
    }
  }

 private:
  std::vector<Source> sources_;             // by extent begin; none is empty
  std::vector<std::int64_t> furthest_end_;  // running maximum of extent ends
};

// A place in a sequence that only moves forward.
class Cursor {
 public:
  Cursor(const RunSequence& runs, std::int64_t global) : runs_(runs) { jump(global); }
  [[nodiscard]] bool done() const { return index_ >= runs_.size(); }
  [[nodiscard]] const Run& run() const { return run_; }
  [[nodiscard]] std::int64_t end() const { return run_.global + run_.count; }

  // To the next run that ends after `global`: mostly the neighbour.
  void advance(std::int64_t global) {
    ++index_;
    if (done()) return;
    run_ = runs_[index_];
    if (end() <= global) jump(global);
  }

 private:
  void jump(std::int64_t global) {
    index_ = runs_.first_ending_after(global);
    if (!done()) run_ = runs_[index_];
  }

  const RunSequence& runs_;
  std::int64_t index_ = 0;
  Run run_;
};

// Whether `copy` goes on where `last` ends, on both sides.
bool continues(const Copy& last, const Copy& copy) {
  return last.from == copy.from && last.to == copy.to &&
         last.from_local + last.count == copy.from_local &&
         last.to_local + last.count == copy.to_local;
}

// Appends `copy`, joined to the last one where it continues it.
void append(std::vector<Copy>& copies, const Copy& copy) {
  if (!copies.empty() && continues(copies.back(), copy)) {
    copies.back().count += copy.count;
  } else {
    copies.push_back(copy);
  }
}

// Appends the common runs of two sequences that are not empty; `copy` names the two pieces.
void merge(const RunSequence& from, const RunSequence& to, Copy copy, std::vector<Copy>& copies) {
  Cursor a(from, to[0].global);
  Cursor b(to, from[0].global);
  while (!a.done() && !b.done()) {
    const std::int64_t low = std::max(a.run().global, b.run().global);
    const std::int64_t high = std::min(a.end(), b.end());
    if (low < high) {
      copy.from_local = a.run().local + (low - a.run().global);
      copy.to_local = b.run().local + (low - b.run().global);
      copy.count = high - low;
      append(copies, copy);
    }
    if (a.end() <= b.end()) {
      a.advance(b.run().global);
    } else {
      b.advance(a.run().global);
    }
  }
}

// The part of a copy that brings the elements [begin, end) of its target.
Copy part_of(Copy copy, std::int64_t begin, std::int64_t end) {
  copy.from_local += begin - copy.to_local;
  copy.to_local = begin;
  copy.count = end - begin;
  return copy;
}

// From copies into one target, sorted by `to_local`, keeps for each element the one from the lowest
// source. Walks the target; `waiting` holds the copies that have begun and may still be needed.
std::vector<Copy> without_replicas(const std::vector<Copy>& copies) {
  const auto later = [](const Copy& a, const Copy& b) { return a.from > b.from; };
  std::priority_queue<Copy, std::vector<Copy>, decltype(later)> waiting(later);
  std::vector<Copy> kept;
  std::size_t next = 0;
  std::int64_t at = 0;
  while (next < copies.size() || !waiting.empty()) {
    if (waiting.empty()) at = std::max(at, copies[next].to_local);
    for (; next < copies.size() && copies[next].to_local <= at; ++next) waiting.push(copies[next]);
    const Copy best = waiting.top();
    const std::int64_t end = best.to_local + best.count;
    if (end <= at) {
      waiting.pop();
      continue;
    }
    const std::int64_t stop = next < copies.size() ? std::min(end, copies[next].to_local) : end;
    append(kept, part_of(best, at, stop));
    at = stop;
  }
  return kept;
}

void sort_by_target(std::vector<Copy>& copies) {
  const auto earlier = [](const Copy& a, const Copy& b) { return a.to_local < b.to_local; };
  if (!std::is_sorted(copies.begin(), copies.end(), earlier)) {
    std::sort(copies.begin(), copies.end(), earlier);
  }
}

// Whether copies into one target, sorted by `to_local`, overlap.
bool have_replicas(const std::vector<Copy>& copies) {
  const auto overlap = [](const Copy& a, const Copy& b) {
    return a.to_local + a.count > b.to_local;
  };
  return std::adjacent_find(copies.begin(), copies.end(), overlap) != copies.end();
}

// The copies that fill one target of a plan.
std::vector<Copy> fill(const Sources& sources, std::span<const Slice> from, const Slice& target,
                       std::size_t target_index, const RunSequence& runs) {
  std::vector<Copy> copies;
  sources.near(extent_of(runs), [&](const Source& source) {
    Copy copy{source.index, target_index, 0, 0, numel(target)};
    if (from[source.index] == target) {
      copies.push_back(copy);
    } else if (!boxes_are_apart(from[source.index], target)) {
      merge(source.runs, runs, copy, copies);
    }
  });
  sort_by_target(copies);
  if (have_replicas(copies)) return without_replicas(copies);
  return copies;
}

void require_all_inside(std::span<const Slice> slices, const Shape& shape) {
  for (const Slice& slice : slices) require_inside(slice, shape);
}

// `filled`: the first element of the target that no piece holds.
[[noreturn]] void refuse_hole(const Shape& shape, const Slice& target, std::int64_t filled) {
  const RunSequence runs(target, shape);
  const Run run = runs[filled / runs[0].count];
  throw Error(ErrorCode::incomplete,
              element_name(shape, run.global + filled - run.local) + " is in no piece");
}

}  // namespace

std::vector<Copy> plan_copies(const Shape& shape, std::span<const Slice> from,
                              std::span<const Slice> to) {
  require_all_inside(from, shape);
  require_all_inside(to, shape);
  const Sources sources(shape, from);
  std::vector<Copy> plan;
  for (std::size_t target = 0; target < to.size(); ++target) {
    const RunSequence runs(to[target], shape);
    if (runs.size() == 0) continue;
    const std::vector<Copy> copies = fill(sources, from, to[target], target, runs);
    plan.insert(plan.end(), copies.begin(), copies.end());
  }
  return plan;
}

void require_filled(const Shape& shape, std::span<const Slice> to, std::span<const Copy> plan) {
  auto copy = plan.begin();
  for (std::size_t target = 0; target < to.size(); ++target) {
    std::int64_t filled = 0;
    for (; copy != plan.end() && copy->to == target && copy->to_local == filled; ++copy) {
      filled += copy->count;
    }
    if (filled < numel(to[target])) refuse_hole(shape, to[target], filled);
  }
}

// Proof that pieces hold every element exactly once, or at most once.
//
// All pieces become boxes; a flat range is at most 2 * dims - 1 of them. Along the first dimension
// the edges of the boxes cut the tensor into slabs inside which the set of boxes does not change,
// so each slab is judged by its first row, in the remaining dimensions. Slabs come in ascending
// order: the first fault found is the first in row-major order. The work depends on the number of
// pieces, never on the number of rows.

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

  // The begins of slabs along dimension `d`, ascending.
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

RunSequence::RunSequence(const Slice& slice, const Shape& shape) {
  if (const FlatRange* range = std::get_if<FlatRange>(&slice)) {
    base_ = range->begin;
    length_ = range->end - range->begin;
    count_ = length_ > 0 ? 1 : 0;
    return;
  }
  const Box& box = std::get<Box>(slice);
  length_ = 1;
  if (numel(box.sizes) == 0) return;
  const Shape strides = contiguous_strides(shape);
  std::size_t split = shape.size();  // dimensions from `split` on lie inside one run
  while (split > 0) {
    --split;
    length_ *= box.sizes[split];
    if (box.sizes[split] != shape[split]) break;
  }
  count_ = 1;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    base_ += box.offsets[d] * strides[d];
    if (d >= split || box.sizes[d] == 1) continue;
    outer_sizes_.push_back(box.sizes[d]);
    outer_strides_.push_back(strides[d]);
    count_ *= box.sizes[d];
  }
}

Run RunSequence::operator[](std::int64_t index) const {
  Run run{base_, index * length_, length_};
  std::int64_t rest = index;
  for (std::size_t d = outer_sizes_.size(); d-- > 0;) {
    run.global += (rest % outer_sizes_[d]) * outer_strides_[d];
    rest /= outer_sizes_[d];
  }
  return run;
}

std::int64_t RunSequence::first_ending_after(std::int64_t global) const {
  std::int64_t low = 0;
  std::int64_t high = count_;
  while (low < high) {
    const std::int64_t middle = low + (high - low) / 2;
    if ((*this)[middle].global + length_ > global) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

}  // namespace tessera
