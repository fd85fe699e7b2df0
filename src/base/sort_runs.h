// Sorting what is nearly in order.
#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

namespace tessera {

// std::stable_sort, in time that is in proportion to the items where few ascending runs follow each
// other: the tensors of a file come sorted by name within each dtype.
template <typename T, typename Less>
void sort_runs(std::vector<T>& items, const Less& less) {
  constexpr std::size_t kFew = 64;
  std::vector<std::size_t> cuts{0};  // where runs begin, and the end
  for (std::size_t i = 1; i < items.size() && cuts.size() <= kFew; ++i) {
    if (less(items[i], items[i - 1])) cuts.push_back(i);
  }
  if (cuts.size() > kFew) return std::stable_sort(items.begin(), items.end(), less);
  cuts.push_back(items.size());
  const auto at = [&](std::size_t cut) {
    return items.begin() + static_cast<std::ptrdiff_t>(cuts[cut]);
  };
  while (cuts.size() > 2) {
    std::vector<std::size_t> left{0};
    for (std::size_t i = 0; i + 2 < cuts.size(); i += 2) {
      std::inplace_merge(at(i), at(i + 1), at(i + 2), less);
      left.push_back(cuts[i + 2]);
    }
    if (left.back() != items.size()) left.push_back(items.size());  // one without a partner
    cuts = std::move(left);
  }
}

}  // namespace tessera
