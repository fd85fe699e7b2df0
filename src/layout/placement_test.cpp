#include "layout/placement.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>

#include "layout/plan.h"

namespace tessera {
namespace {

std::vector<Slice> all_boxes(const Placement& placement, const Shape& shape) {
  std::vector<Slice> boxes;
  for (int part = 0; part < placement.parts; ++part) {
    for (Box& box : boxes_of_part(placement, shape, part)) boxes.emplace_back(std::move(box));
  }
  return boxes;
}

TEST(Placement, RanksOfAGridHoldTheirParts) {
  const Placement hybrid{.parts = 2, .stride = 1};  // shards within hosts of two ranks
  const Placement across{.parts = 2, .stride = 2};
  std::vector<int> within, over;
  for (int rank = 0; rank < 4; ++rank) {
    within.push_back(part_of_rank(hybrid, rank));
    over.push_back(part_of_rank(across, rank));
  }
  EXPECT_EQ(within, (std::vector<int>{0, 1, 0, 1}));
  EXPECT_EQ(over, (std::vector<int>{0, 0, 1, 1}));
}

TEST(Placement, PartsAreTorchsChunks) {
  const Placement rows{.parts = 4, .dim = 0};
  EXPECT_EQ(boxes_of_part(rows, {5, 3}, 2), (std::vector<Box>{{{4, 0}, {1, 3}}}));
  EXPECT_TRUE(boxes_of_part(rows, {5, 3}, 3).empty());  // two, two, one, none
  const Placement columns{.parts = 2, .dim = 1};
  EXPECT_EQ(boxes_of_part(columns, {5, 3}, 1), (std::vector<Box>{{{0, 2}, {5, 1}}}));
}

TEST(Placement, AMemberOfAFlatParameterIsCutWhereThatIs) {
  // Elements 3 to 8 of a flat parameter whose parts have five.
  const Placement flat{.parts = 2, .shard = 5, .begin = 3};
  EXPECT_EQ(boxes_of_part(flat, {2, 3}, 0), (std::vector<Box>{{{0, 0}, {1, 2}}}));
  EXPECT_EQ(boxes_of_part(flat, {2, 3}, 1), (std::vector<Box>{{{0, 2}, {1, 1}}, {{1, 0}, {1, 3}}}));
}

TEST(Placement, PartsHaveEveryElementOnce) {
  std::mt19937 random(17);
  const auto draw = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  int whole_or_flat = 0;
  for (int i = 0; i < 2000; ++i) {
    Shape shape(static_cast<std::size_t>(draw(0, 3)));
    for (auto& size : shape) size = draw(0, 5);
    Placement placement{.parts = draw(1, 6), .stride = draw(1, 3)};
    if (draw(0, 1) == 1) placement.shard = draw(1, 40), placement.begin = draw(0, 60);
    if (!shape.empty()) placement.dim = draw(0, static_cast<int>(shape.size()) - 1);
    const int ranks = placement.parts * placement.stride;
    EXPECT_FALSE(fits(placement, shape, ranks - 1));
    if (!fits(placement, shape, ranks)) continue;
    ++whole_or_flat;
    EXPECT_NO_THROW(require_covered_once(shape, all_boxes(placement, shape))) << i;
  }
  EXPECT_GT(whole_or_flat, 800);
}

TEST(Placement, WhatDoesNotFitIsSaid) {
  const Shape shape{4, 4};
  EXPECT_FALSE(fits({.parts = 0}, shape, 4));
  EXPECT_FALSE(fits({.parts = 2, .stride = 0}, shape, 4));
  EXPECT_FALSE(fits({.parts = 2, .dim = 2}, shape, 4));
  EXPECT_FALSE(fits({.parts = 2, .dim = -1}, shape, 4));
  EXPECT_FALSE(fits({.parts = 2, .shard = 5, .begin = 0}, shape, 4));  // 10 of 16 elements
  EXPECT_FALSE(fits({.parts = 2, .shard = -5}, shape, 4));
  const std::int64_t large = std::numeric_limits<std::int64_t>::max() / 2;
  EXPECT_TRUE(fits({.parts = 4, .shard = large, .begin = 0}, shape, 4));
}

}  // namespace
}  // namespace tessera
