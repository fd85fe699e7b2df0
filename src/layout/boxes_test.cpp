#include "layout/boxes.h"

#include <limits>
#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "conformance/errors.h"
#include "layout/plan.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;

TEST(BoxesOf, CutsARangeIntoItsRowsAndEnds) {
  // Elements 2 to 10 of rows of 3: the end of row 0, rows 1 and 2, the beginning of row 3.
  EXPECT_THAT(boxes_of({2, 10}, {5, 3}),
              ElementsAre(Box{{0, 2}, {1, 1}}, Box{{1, 0}, {2, 3}}, Box{{3, 0}, {1, 1}}));
  EXPECT_THAT(boxes_of({1, 2}, {5, 3}), ElementsAre(Box{{0, 1}, {1, 1}}));
  EXPECT_THAT(boxes_of({3, 9}, {5, 3}), ElementsAre(Box{{1, 0}, {2, 3}}));
  EXPECT_THAT(boxes_of({4, 7}, {9}), ElementsAre(Box{{4}, {3}}));
  EXPECT_THAT(boxes_of({0, 1}, {}), ElementsAre(Box{{}, {}}));
  EXPECT_TRUE(boxes_of({4, 4}, {5, 3}).empty());
  EXPECT_ANY_THROW(static_cast<void>(boxes_of({4, 16}, {5, 3})));
}

TEST(BoxesOf, OfEveryRangeCoverItInOrder) {
  const Shape shape{3, 2, 4};
  for (std::int64_t begin = 0; begin <= 24; ++begin) {
    for (std::int64_t end = begin; end <= 24; ++end) {
      std::int64_t at = begin;
      for (const auto& box : boxes_of({begin, end}, shape)) {
        const RunSequence runs(box, shape);
        for (std::int64_t r = 0; r < runs.size(); ++r) {
          EXPECT_EQ(runs[r].global, at);
          at += runs[r].count;
        }
      }
      EXPECT_EQ(at, end) << begin;
    }
  }
}

TEST(Chunks, AreTorchsForEverySizeAndNumberOfParts) {
  EXPECT_EQ(chunk_size(5, 4), 2);
  EXPECT_EQ(chunk_begin(5, 4, 3), 5);  // two, two, one, none
  for (std::int64_t size = 0; size < 12; ++size) {
    for (std::int64_t parts = 1; parts < 8; ++parts) {
      std::int64_t next = 0;
      for (std::int64_t index = 0; index < parts; ++index) {
        const Box box = chunk_of(whole({3, size}), 1, parts, index);
        EXPECT_EQ(box.offsets, (Shape{0, next}));
        EXPECT_LE(box.sizes[1], chunk_size(size, parts));
        EXPECT_EQ(box.sizes[0], 3);
        next += box.sizes[1];
      }
      EXPECT_EQ(next, size);
    }
  }
}

TEST(Bounds, HoldTheSliceAndNoMore) {
  const Shape shape{4, 3, 5};
  EXPECT_EQ(bounds_of(Box{{1, 0, 2}, {2, 3, 1}}, shape), (Box{{1, 0, 2}, {2, 3, 1}}));
  EXPECT_EQ(bounds_of(FlatRange{17, 19}, shape), (Box{{1, 0, 2}, {1, 1, 2}}));
  EXPECT_EQ(bounds_of(FlatRange{16, 24}, shape), (Box{{1, 0, 0}, {1, 2, 5}}));
  EXPECT_EQ(bounds_of(FlatRange{14, 16}, shape), (Box{{0, 0, 0}, {2, 3, 5}}));
  EXPECT_EQ(bounds_of(FlatRange{15, 45}, shape), (Box{{1, 0, 0}, {2, 3, 5}}));
  EXPECT_EQ(bounds_of(FlatRange{0, 1}, {}), (Box{{}, {}}));
  EXPECT_EQ(code_of([&] { (void)bounds_of(FlatRange{3, 3}, shape); }), ErrorCode::invalid_argument);
  EXPECT_EQ(code_of([&] { (void)bounds_of(FlatRange{3, 61}, shape); }), ErrorCode::corrupt);
}

using Rows = std::vector<std::vector<std::int64_t>>;

bool is_row(const Shape& shape, const Rows& rows) {
  return is_row_of_slices(shape, rows.size(), [&](std::size_t i) { return std::span(rows[i]); });
}

TEST(RowOfSlices, CutsOneDimensionWithoutGapsAndOverlaps) {
  EXPECT_TRUE(is_row({4, 6}, {{0, 0, 1, 6}, {1, 0, 3, 6}}));
  EXPECT_TRUE(is_row({4, 6}, {{0, 0, 4, 2}, {0, 2, 4, 0}, {0, 2, 4, 4}}));
  EXPECT_TRUE(is_row({4, 6}, {{0, 0, 4, 6}}));
  EXPECT_FALSE(is_row({4, 6}, {{1, 0, 3, 6}, {0, 0, 1, 6}}));  // in another order
  EXPECT_FALSE(is_row({4, 6}, {{0, 0, 1, 6}, {2, 0, 2, 6}}));  // a gap
  EXPECT_FALSE(is_row({4, 6}, {{0, 0, 2, 6}, {1, 0, 3, 6}}));  // an overlap
  EXPECT_FALSE(is_row({4, 6}, {{0, 0, 2, 6}}));                // an end that is missing
  EXPECT_FALSE(is_row({4, 6}, {{0, 0, 2, 6}, {2, 0, 2, 3}, {2, 3, 2, 3}}));  // two dimensions
  EXPECT_FALSE(is_row({4, 6}, {}));
  EXPECT_FALSE(is_row({}, {{}}));
}

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
    for (int part = 0; part < placement.parts; ++part) {
      std::int64_t elements = 0;
      for (const Box& box : boxes_of_part(placement, shape, part)) elements += numel(box);
      EXPECT_EQ(elements_of_part(placement, shape, part), elements) << i;
    }
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
