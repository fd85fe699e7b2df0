#include <algorithm>
#include <numeric>
#include <queue>
#include <tuple>

#include "layout/element.h"
#include "layout/plan.h"
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

// What a copy brings to the elements [begin, end) of its target.
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

// Of copies into one target, sorted by `to_local`.
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

}  // namespace tessera
