// What ranks tell of chunks that others cannot compute.
#include "checkpoint/save/proposals.h"

#include <gtest/gtest.h>

#include "conformance/errors.h"

namespace tessera {
namespace {

struct Told {
  int rank = 0;
  Box box;
};

ToldLeaves told_of(const Shape& shape, const std::vector<Told>& chunks) {
  PlannedLeaf leaf;
  leaf.name = "w";
  leaf.is_tensor = true;
  leaf.shape = shape;
  const std::vector<PlannedLeaf> leaves{leaf};
  ToldLeaves told(leaves, false);
  for (const Told& chunk : chunks) {
    const std::vector<std::vector<HeldChunk>> held{{{chunk.box, 0}}};
    told.add(encode_proposal({chunk.rank, false, leaves, held, {}}));
  }
  return told;
}

ErrorCode refused(const Shape& shape, const std::vector<Told>& chunks) {
  return code_of([&] { told_of(shape, chunks).finish(); });
}

const Box kTop{{0, 0}, {2, 3}}, kBottom{{2, 0}, {2, 3}};
const Box kLeft{{0, 0}, {4, 1}}, kRight{{0, 1}, {4, 2}};

TEST(ToldLeaves, ChunksAreInOrderWithAllTheirHolders) {
  ToldLeaves told = told_of({4, 3}, {{0, kBottom}, {1, kTop}, {2, kBottom}, {3, kTop}, {3, kTop}});
  told.finish();
  std::vector<Box> boxes;
  std::vector<std::vector<int>> holders;
  told.chunks(0, [&](const Box& box, std::span<const int> ranks) {
    boxes.push_back(box);
    holders.emplace_back(ranks.begin(), ranks.end());
  });
  EXPECT_EQ(boxes, (std::vector<Box>{kTop, kBottom}));
  EXPECT_EQ(holders, (std::vector<std::vector<int>>{{1, 3}, {0, 2}}));
}

TEST(ToldLeaves, RowsAndColumnsAndGridsCover) {
  EXPECT_NO_THROW(told_of({4, 3}, {{0, kTop}, {1, kBottom}}).finish());
  EXPECT_NO_THROW(told_of({4, 3}, {{0, kLeft}, {1, kRight}}).finish());
  EXPECT_NO_THROW(told_of({4, 3}, {{0, whole({4, 3})}}).finish());
  EXPECT_NO_THROW(told_of({}, {{0, whole({})}, {1, whole({})}}).finish());
  EXPECT_NO_THROW(told_of({4, 3}, {{0, {{0, 0}, {2, 1}}},
                                   {1, {{0, 1}, {2, 2}}},
                                   {2, {{2, 0}, {2, 1}}},
                                   {3, {{2, 1}, {2, 2}}}})
                      .finish());
}

TEST(ToldLeaves, WhatDoesNotCoverOnceIsRefused) {
  EXPECT_EQ(refused({4, 3}, {{0, kTop}}), ErrorCode::incomplete);
  EXPECT_EQ(refused({4, 3}, {{0, kBottom}}), ErrorCode::incomplete);
  EXPECT_EQ(refused({4, 3}, {}), ErrorCode::incomplete);
  EXPECT_EQ(refused({4, 3}, {{0, kLeft}, {1, {{0, 2}, {4, 1}}}}), ErrorCode::incomplete);
  // Overlapping, and two that begin at one place.
  EXPECT_EQ(refused({4, 3}, {{0, kTop}, {1, {{1, 0}, {3, 3}}}}), ErrorCode::conflict);
  EXPECT_EQ(refused({4, 3}, {{0, kTop}, {1, {{0, 0}, {4, 3}}}}), ErrorCode::conflict);
}

}  // namespace
}  // namespace tessera
