#include <algorithm>

#include "base/checked.h"
#include "layout/strided.h"
#include "tessera/layout.h"

namespace tessera {
namespace {

void refuse_bad_request(const Shape& sizes, const Shape& strides, std::int64_t begin,
                        std::int64_t count) {
  if (sizes.size() != strides.size()) {
    throw Error(ErrorCode::invalid_argument,
                "strides " + to_string(strides) + " for the sizes " + to_string(sizes));
  }
  const std::int64_t have = numel(sizes);
  if (begin < 0 || count < 0 || begin > have || count > have - begin) {
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

}  // namespace

std::int64_t strided_reach(const Shape& sizes, const Shape& strides) {
  const auto is_negative = [](std::int64_t n) { return n < 0; };
  if (sizes.size() != strides.size() || std::any_of(sizes.begin(), sizes.end(), is_negative) ||
      std::any_of(strides.begin(), strides.end(), is_negative)) {
    throw Error(ErrorCode::invalid_argument,
                "strides " + to_string(strides) + " for the sizes " + to_string(sizes));
  }
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
  // The trailing dimensions that lie densely, row-major, are one row.
  std::int64_t row = 1;
  std::size_t outer = sizes.size();
  while (outer > 0 && (sizes[outer - 1] == 1 || strides[outer - 1] == row)) row *= sizes[--outer];
  // Index and position of the row that holds `begin`.
  Shape index(outer);
  std::int64_t position = 0;
  std::int64_t rest = begin / row;
  for (std::size_t d = outer; d-- > 0;) {
    index[d] = rest % sizes[d];
    rest /= sizes[d];
    position += index[d] * strides[d];
  }
  std::int64_t within = begin % row;
  std::int64_t run_begin = position + within;  // the run not visited yet
  std::int64_t run_end = run_begin;
  while (true) {
    const std::int64_t taken = std::min(count, row - within);
    if (position + within != run_end) {
      visit(run_begin, run_end - run_begin);
      run_begin = position + within;
    }
    run_end = position + within + taken;
    count -= taken;
    if (count == 0) break;
    within = 0;
    for (std::size_t d = outer; d-- > 0;) {
      if (++index[d] < sizes[d]) {
        position += strides[d];
        break;
      }
      position -= (sizes[d] - 1) * strides[d];
      index[d] = 0;
    }
  }
  visit(run_begin, run_end - run_begin);
}

}  // namespace tessera
