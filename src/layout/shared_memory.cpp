// The bytes of an array are sums of multiples of its strides, so arrays a and b meet where
//
//   sum of (stride of a * i) - sum of (stride of b * j) = address of b - address of a
//
// has integers within the sizes. Dimensions of one stride, of a or b, are one unknown. A search by
// descending stride leaves each unknown the values that the smaller strides can still make good:
// one or two, where a stride is longer than what lies within one step of it. Strides that have
// nothing to do with each other may leave many; then the runs of both are gone through in ascending
// order.
#include "layout/shared_memory.h"

#include <algorithm>
#include <span>
#include <vector>

namespace tessera {
namespace {

using Steps = std::vector<BytePattern::Step>;

// An unknown from `least` to `most`, times `stride`; and what it and all behind it can make.
struct Term {
  std::int64_t stride = 1;
  std::int64_t least = 0, most = 0;
  std::int64_t reach_least = 0, reach_most = 0;
};

// By ascending stride.
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

}  // namespace tessera
