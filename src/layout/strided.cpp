#include "layout/strided.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <span>
#include <vector>

#include "base/numbers.h"
#include "tessera/error.h"
#include "tessera/layout.h"

namespace tessera {
namespace {

[[noreturn]] void refuse_strides(const Shape& sizes, const Shape& strides) {
  throw Error(ErrorCode::invalid_argument,
              "strides " + to_string(strides) + " for the sizes " + to_string(sizes));
}

bool has_negative(const Shape& numbers) {
  return std::ranges::any_of(numbers, [](std::int64_t n) { return n < 0; });
}

bool is_part(std::int64_t begin, std::int64_t count, std::int64_t have) {
  return begin >= 0 && count >= 0 && begin <= have && count <= have - begin;
}

void refuse_bad_request(const Shape& sizes, const Shape& strides, std::int64_t begin,
                        std::int64_t count) {
  if (sizes.size() != strides.size()) refuse_strides(sizes, strides);
  const std::int64_t have = numel(sizes);
  if (!is_part(begin, count, have)) {
    throw Error(ErrorCode::invalid_argument, std::to_string(count) + " elements from " +
                                                 std::to_string(begin) + " of an array of " +
                                                 std::to_string(have));
  }
}

// Every position lies between the sums of the negative and of the positive reaches: when both fit,
// no sum below overflows.
void refuse_overflow(const Shape& sizes, const Shape& strides) {
  std::int64_t low = 0;
  std::int64_t high = 0;
  for (std::size_t d = 0; d < sizes.size(); ++d) {
    const std::int64_t reach = checked_mul(sizes[d] - 1, strides[d]);
    (reach < 0 ? low : high) = checked_add(reach < 0 ? low : high, reach);
  }
  (void)checked_add(high, numel(sizes));
}

// Goes through the rows of an array: the trailing dimensions that lie densely, row-major, are one.
class Rows {
 public:
  Rows(const Shape& sizes, const Shape& strides)
      : sizes_(sizes), strides_(strides), outer_(sizes.size()) {
    while (outer_ > 0 && (sizes[outer_ - 1] == 1 || strides[outer_ - 1] == length_))
      length_ *= sizes[--outer_];
    index_.resize(outer_);
  }

  [[nodiscard]] std::int64_t length() const { return length_; }
  [[nodiscard]] std::int64_t position() const { return position_; }  // of the row's first element

  void go_to(std::int64_t row) {
    position_ = 0;
    for (std::size_t d = outer_; d-- > 0;) {
      index_[d] = row % sizes_[d];
      row /= sizes_[d];
      position_ += index_[d] * strides_[d];
    }
  }

  void next() {
    for (std::size_t d = outer_; d-- > 0;) {
      if (++index_[d] < sizes_[d]) {
        position_ += strides_[d];
        return;
      }
      position_ -= (sizes_[d] - 1) * strides_[d];
      index_[d] = 0;
    }
  }

 private:
  const Shape& sizes_;
  const Shape& strides_;
  std::size_t outer_;        // dimensions before those that make a row
  std::int64_t length_ = 1;  // elements of a row
  Shape index_;              // of the row, in the outer dimensions
  std::int64_t position_ = 0;
};

}  // namespace

std::int64_t strided_reach(const Shape& sizes, const Shape& strides) {
  if (sizes.size() != strides.size() || has_negative(sizes) || has_negative(strides))
    refuse_strides(sizes, strides);
  if (numel(sizes) == 0) return 0;
  std::int64_t last = 0;
  for (std::size_t d = 0; d < sizes.size(); ++d)
    last = checked_add(last, checked_mul(sizes[d] - 1, strides[d]));
  return checked_add<std::int64_t>(last, 1);
}

void for_each_strided_run(const Shape& sizes, const Shape& strides, std::int64_t begin,
                          std::int64_t count,
                          const std::function<void(std::int64_t, std::int64_t)>& visit) {
  refuse_bad_request(sizes, strides, begin, count);
  if (count == 0) return;
  refuse_overflow(sizes, strides);
  Rows rows(sizes, strides);
  rows.go_to(begin / rows.length());
  std::int64_t within = begin % rows.length();
  std::int64_t run_begin = rows.position() + within;  // the run not visited yet
  std::int64_t run_end = run_begin;
  while (true) {
    const std::int64_t taken = std::min(count, rows.length() - within);
    const std::int64_t at = rows.position() + within;
    if (at != run_end) {
      visit(run_begin, run_end - run_begin);
      run_begin = at;
    }
    run_end = at + taken;
    count -= taken;
    if (count == 0) break;
    within = 0;
    rows.next();
  }
  visit(run_begin, run_end - run_begin);
}

// The bytes of an array are sums of multiples of its strides, so arrays a and b meet where
//
//   sum of (stride of a * i) - sum of (stride of b * j) = address of b - address of a
//
// has integers within the sizes. Dimensions of one stride, of a or b, are one unknown. A search by
// descending stride leaves each unknown the values that the smaller strides can still make good:
// one or two, where a stride is longer than what lies within one step of it. Strides that have
// nothing to do with each other may leave many; then the runs of both are gone through in ascending
// order.

namespace {

using Steps = std::vector<BytePattern::Step>;

// An unknown from `least` to `most`, times `stride`; and what it and all behind it can make.
struct Term {
  std::int64_t stride = 1;
  std::int64_t least = 0, most = 0;
  std::int64_t reach_least = 0, reach_most = 0;
};

// The terms by ascending stride.
std::vector<Term> terms_of(const Steps& a, const Steps& b) {
  std::vector<Term> terms;
  terms.reserve(a.size() + b.size());
  auto next_a = a.begin();
  auto next_b = b.begin();
  std::int64_t least = 0, most = 0;
  while (next_a != a.end() || next_b != b.end()) {
    const bool has_a = next_b == b.end() || (next_a != a.end() && next_a->stride <= next_b->stride);
    const bool has_b = next_a == a.end() || (next_b != b.end() && next_b->stride <= next_a->stride);
    Term term{.stride = has_a ? next_a->stride : next_b->stride};
    if (has_a) term.most = next_a++->count - 1;
    if (has_b) term.least = 1 - next_b++->count;
    least += term.stride * term.least;
    most += term.stride * term.most;
    term.reach_least = least;
    term.reach_most = most;
    terms.push_back(term);
  }
  return terms;
}

enum class Found { yes, no, unknown };

class Search {
 public:
  explicit Search(std::vector<Term> terms) : terms_(std::move(terms)) {}

  Found find(std::int64_t sum) { return find(terms_.size() - 1, sum); }

 private:
  // Whether term `at` and those with smaller strides can make `sum`. The first one's stride is one
  // byte.
  Found find(std::size_t at, std::int64_t sum) {
    const Term& term = terms_[at];
    if (sum < term.reach_least || sum > term.reach_most) return Found::no;
    if (at == 0) return Found::yes;
    const Term& rest = terms_[at - 1];
    const std::int64_t first = std::max(term.least, divided_up(sum - rest.reach_most, term.stride));
    const std::int64_t last =
        std::min(term.most, divided_down(sum - rest.reach_least, term.stride));
    for (std::int64_t value = first; value <= last; ++value) {
      if (--steps_ < 0) return Found::unknown;
      const Found found = find(at - 1, sum - value * term.stride);
      if (found != Found::no) return found;
    }
    return Found::no;
  }

  static std::int64_t divided_down(std::int64_t number, std::int64_t by) {
    return number / by - (number % by < 0 ? 1 : 0);
  }
  static std::int64_t divided_up(std::int64_t number, std::int64_t by) {
    return -divided_down(-number, by);
  }

  std::vector<Term> terms_;
  std::int64_t steps_ = 1 << 16;
};

// The runs of an array in ascending order, as offsets from its first byte.
class Runs {
 public:
  explicit Runs(const Steps& steps)
      : length_(steps.front().count), outer_(steps.begin() + 1, steps.end()) {
    std::int64_t reach = length_;
    for (const BytePattern::Step& step : outer_) {
      is_nested_ = is_nested_ && step.stride >= reach;
      reach += step.stride * (step.count - 1);
      runs_ *= step.count;
    }
    index_.assign(outer_.size(), 0);
    if (is_nested_) return;
    spread_.reserve(static_cast<std::size_t>(runs_));
    for (std::int64_t i = 0; i < runs_; ++i, step()) spread_.push_back(at_);
    std::ranges::sort(spread_);
    at_ = spread_.front();
  }

  [[nodiscard]] bool at_end() const { return done_ == runs_; }
  [[nodiscard]] std::int64_t begin() const { return at_; }
  [[nodiscard]] std::int64_t end() const { return at_ + length_; }
  void next() {
    ++done_;
    if (at_end()) return;
    if (is_nested_) return step();
    at_ = spread_[static_cast<std::size_t>(done_)];
  }

 private:
  // To the next one with the innermost dimension counting first.
  void step() {
    for (std::size_t d = 0; d < outer_.size(); ++d) {
      at_ += outer_[d].stride;
      if (++index_[d] < outer_[d].count) return;
      at_ -= outer_[d].stride * outer_[d].count;
      index_[d] = 0;
    }
  }

  std::int64_t length_;
  Steps outer_;
  bool is_nested_ = true;  // that order is the ascending one
  std::int64_t runs_ = 1;
  std::int64_t done_ = 0;
  std::int64_t at_ = 0;
  std::vector<std::int64_t> index_;
  std::vector<std::int64_t> spread_;  // where runs begin, if that is not nested
};

// `distance`: from the first byte of a to that of b.
bool do_runs_meet(Runs a, Runs b, std::int64_t distance) {
  while (!a.at_end() && !b.at_end()) {
    if (a.end() <= b.begin() + distance) {
      a.next();
    } else if (b.end() + distance <= a.begin()) {
      b.next();
    } else {
      return true;
    }
  }
  return false;
}

}  // namespace

BytePattern bytes_of_array(std::uint64_t address, std::size_t element, const Shape& sizes,
                           const Shape& strides) {
  if (numel(sizes) == 0) return {address, {}};
  const auto width = static_cast<std::int64_t>(element);
  Steps all{{1, width}};
  for (std::size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] > 1 && strides[d] > 0) all.push_back({strides[d] * width, sizes[d]});
  }
  std::ranges::sort(all, {}, &BytePattern::Step::stride);
  BytePattern pattern{address, {}};
  for (const BytePattern::Step& step : all) {
    if (!pattern.steps.empty() &&
        step.stride == pattern.steps.back().stride * pattern.steps.back().count) {
      pattern.steps.back().count *= step.count;
    } else {
      pattern.steps.push_back(step);
    }
  }
  return pattern;
}

bool share_memory(const BytePattern& a, const BytePattern& b) {
  if (a.steps.empty() || b.steps.empty()) return false;
  const auto distance = static_cast<std::int64_t>(b.address - a.address);
  const Found found = Search(terms_of(a.steps, b.steps)).find(distance);
  if (found != Found::unknown) return found == Found::yes;
  return do_runs_meet(Runs(a.steps), Runs(b.steps), distance);
}

namespace {

// Elements of any alignment.
template <std::size_t Bytes>
struct Word {
  std::byte bytes[Bytes];
};

template <typename Element>
void copy_line(const Element* from, std::int64_t from_step, Element* to, std::int64_t to_step,
               std::int64_t count) {
  if (to_step == 1 && from_step == 1) {
    std::memcpy(to, from, static_cast<std::size_t>(count) * sizeof(Element));
  } else if (to_step == 1 && from_step == 0) {
    std::fill_n(to, count, *from);
  } else {
    for (std::int64_t i = 0; i < count; ++i) to[i * to_step] = from[i * from_step];
  }
}

// Goes through a block in the cache: of the source whole lines are read, of the target whole lines
// are written, whatever the two strides do to the cache's sets. `along` is dense in what is
// written, `across` in what is read.
template <typename Element>
void copy_plane(const Element* from, Element* to, const StridedDim& along,
                const StridedDim& across) {
  constexpr std::int64_t kBlock = sizeof(Element) <= 4 ? 64 : 32;
  constexpr std::int64_t kRow = kBlock + 64 / static_cast<std::int64_t>(sizeof(Element));
  Element block[kBlock * kRow];
  for (std::int64_t j = 0; j < across.size; j += kBlock) {
    const std::int64_t rows = std::min(kBlock, across.size - j);
    for (std::int64_t i = 0; i < along.size; i += kBlock) {
      const std::int64_t columns = std::min(kBlock, along.size - i);
      const Element* const corner = from + i * along.from + j * across.from;
      for (std::int64_t x = 0; x < columns; ++x) {
        const Element* const line = corner + x * along.from;
        for (std::int64_t y = 0; y < rows; ++y) block[y * kRow + x] = line[y * across.from];
      }
      Element* const target = to + i * along.to + j * across.to;
      for (std::int64_t y = 0; y < rows; ++y)
        copy_line(block + y * kRow, 1, target + y * across.to, along.to, columns);
    }
  }
}

// The dimension whose stride is the smallest; of reading only strides that lead on.
std::size_t smallest(const std::vector<StridedDim>& dims, std::int64_t StridedDim::*stride) {
  std::size_t found = 0;
  const auto of = [&](std::size_t d) { return std::abs(dims[d].*stride); };
  for (std::size_t d = 1; d < dims.size(); ++d) {
    if (of(d) != 0 && (of(found) == 0 || of(d) < of(found))) found = d;
  }
  return found;
}

std::vector<StridedDim> all_but(const std::vector<StridedDim>& dims, std::size_t one,
                                std::size_t other) {
  std::vector<StridedDim> rest;
  for (std::size_t d = 0; d < dims.size(); ++d) {
    if (d != one && d != other) rest.push_back(dims[d]);
  }
  return rest;
}

template <typename Element>
void copy_elements(const StridedMove& move, const Element* from, Element* to) {
  if (move.dims.empty()) {
    to[move.to] = from[move.from];
    return;
  }
  const std::size_t along = smallest(move.dims, &StridedDim::to);
  const std::size_t across = smallest(move.dims, &StridedDim::from);
  std::vector<StridedDim> outer = all_but(move.dims, along, across);
  const StridedDim& line = move.dims[along];
  const bool plane = along != across && move.dims[across].from != 0 && line.from != 0;
  if (!plane && along != across) outer.push_back(move.dims[across]);
  StridedWalk walk(outer, move.from, move.to);
  do {
    if (plane) {
      copy_plane(from + walk.from, to + walk.to, line, move.dims[across]);
    } else {
      copy_line(from + walk.from, line.from, to + walk.to, line.to, line.size);
    }
  } while (walk.next());
}

// Makes every dimension lead on in the source.
void turn_forward(StridedMove& move) {
  for (StridedDim& dim : move.dims) {
    if (dim.from >= 0) continue;
    move.from += (dim.size - 1) * dim.from;
    move.to += (dim.size - 1) * dim.to;
    dim.from = -dim.from;
    dim.to = -dim.to;
  }
}

// Whether the two dimensions are one, on both sides.
bool continues(const StridedDim& outer, const StridedDim& inner) {
  return outer.from == inner.from * inner.size && outer.to == inner.to * inner.size;
}

std::vector<StridedDim> joined(const std::vector<StridedDim>& dims) {
  std::vector<StridedDim> result;
  for (const StridedDim& dim : dims) {
    if (!result.empty() && continues(result.back(), dim)) {
      result.back() = {result.back().size * dim.size, dim.from, dim.to};
    } else {
      result.push_back(dim);
    }
  }
  return result;
}

}  // namespace

bool StridedWalk::next() {
  for (std::size_t d = dims_.size(); d-- > 0;) {
    const StridedDim& dim = dims_[d];
    if (++index_[d] < dim.size) {
      from += dim.from;
      to += dim.to;
      return true;
    }
    from -= (dim.size - 1) * dim.from;
    to -= (dim.size - 1) * dim.to;
    index_[d] = 0;
  }
  return false;
}

StridedMove normalized(StridedMove move) {
  std::erase_if(move.dims, [](const StridedDim& dim) { return dim.size == 1; });
  turn_forward(move);
  std::stable_sort(move.dims.begin(), move.dims.end(),
                   [](const StridedDim& a, const StridedDim& b) { return a.from > b.from; });
  move.dims = joined(move.dims);
  return move;
}

void copy_strided(const StridedMove& move, const std::byte* from, std::byte* to,
                  std::size_t element) {
  const auto copy = [&]<std::size_t Bytes>() {
    copy_elements(move, reinterpret_cast<const Word<Bytes>*>(from),
                  reinterpret_cast<Word<Bytes>*>(to));
  };
  switch (element) {
    case 1:
      return copy.template operator()<1>();
    case 2:
      return copy.template operator()<2>();
    case 4:
      return copy.template operator()<4>();
    case 8:
      return copy.template operator()<8>();
    case 16:
      return copy.template operator()<16>();
    default:
      throw Error(ErrorCode::invalid_argument, "elements of " + std::to_string(element) + " bytes");
  }
}

}  // namespace tessera
