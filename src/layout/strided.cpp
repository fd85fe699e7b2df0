#include <algorithm>

#include "base/checked.h"
#include "layout/strided.h"
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

}  // namespace tessera
