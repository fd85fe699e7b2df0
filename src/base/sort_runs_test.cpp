#include "base/sort_runs.h"

#include <gtest/gtest.h>

#include <random>

namespace tessera {
namespace {

using Items = std::vector<std::pair<int, int>>;  // what is compared, and where it was

Items runs_of(std::mt19937& random, std::size_t runs, std::size_t most) {
  Items items;
  for (std::size_t run = 0; run < runs; ++run) {
    int value = 0;
    for (std::size_t left = random() % (most + 1); left > 0; --left)
      items.emplace_back(value += static_cast<int>(random() % 3), static_cast<int>(items.size()));
  }
  return items;
}

TEST(SortRuns, DoesWhatAStableSortDoes) {
  const auto less = [](const auto& a, const auto& b) { return a.first < b.first; };
  std::mt19937 random(1);
  for (std::size_t runs = 0; runs < 200; ++runs) {
    Items items = runs_of(random, runs, runs % 7);
    Items expected = items;
    std::ranges::stable_sort(expected, less);
    sort_runs(items, less);
    ASSERT_EQ(items, expected) << runs;
  }
}

TEST(SortRuns, LooksAtFewRunsOnlyAFewTimes) {
  std::mt19937 random(1);
  Items items = runs_of(random, 4, 20'000);
  std::size_t compared = 0;
  sort_runs(items, [&compared](const auto& a, const auto& b) {
    ++compared;
    return a.first < b.first;
  });
  EXPECT_LE(compared, 3 * items.size());
}

}  // namespace
}  // namespace tessera
