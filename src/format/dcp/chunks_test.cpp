// The columns give back the chunks that were put into them.
#include "format/dcp/chunks.h"

#include <gtest/gtest.h>

#include "format/test_support.h"

namespace tessera::dcp {
namespace {

Chunk row(std::int64_t number, std::vector<std::string> transforms = {}) {
  return {{{number, 0}, {1, 4}},
          {"__" + std::to_string(number % 2) + "_0.distcp",
           static_cast<std::uint64_t>(number) * 100, 90, std::move(transforms)}};
}

void expect_equal(const Chunk& found, const Chunk& expected) {
  EXPECT_EQ(found.box, expected.box);
  EXPECT_EQ(found.item.path, expected.item.path);
  EXPECT_EQ(found.item.offset, expected.item.offset);
  EXPECT_EQ(found.item.length, expected.item.length);
  EXPECT_EQ(found.item.transforms, expected.item.transforms);
}

TEST(DcpChunks, GiveBackWhatWasPutIn) {
  // The first transforms come late, after chunks without any.
  const std::vector<Chunk> rows = {row(0), row(1), row(2, {"stream.zstd/1"}), row(3),
                                   row(4, {"a", "b"})};
  Chunks chunks;
  for (const Chunk& chunk : rows) chunks.push_back(chunk);
  ASSERT_EQ(chunks.size(), rows.size());
  std::size_t number = 0;
  for (const Chunk& chunk : chunks) expect_equal(chunk, rows[number++]);
  EXPECT_EQ(number, rows.size());

  chunks.set(1, row(7, {"a", "b"}));
  expect_equal(chunks[0], rows[0]);
  expect_equal(chunks[1], row(7, {"a", "b"}));
  expect_equal(chunks[2], rows[2]);
}

TEST(DcpChunks, ScalarsHaveBoxesWithoutDimensions) {
  Chunks chunks;
  chunks.push_back({Box{}, {"f", 3, 4, {}}});
  ASSERT_EQ(chunks.size(), 1U);
  expect_equal(chunks[0], {Box{}, {"f", 3, 4, {}}});
}

TEST(DcpChunks, AnItemMayComeLater) {
  const std::vector<std::int64_t> offsets{5};
  const std::vector<std::int64_t> sizes{2};
  Chunks chunks;
  chunks.push_back(offsets, sizes);
  EXPECT_FALSE(chunks.has_item(0));
  expect_equal(chunks[0], {{{5}, {2}}, {}});
  chunks.set_item(0, {.path = "f", .offset = 8, .length = 9});
  EXPECT_TRUE(chunks.has_item(0));
  expect_equal(chunks[0], {{{5}, {2}}, {"f", 8, 9, {}}});
}

TEST(DcpChunks, CopiesMayDiffer) {
  Chunks chunks;
  chunks.push_back(row(0));
  Chunks copy = chunks;
  copy.push_back(row(1));
  copy.set(0, row(5, {"t"}));
  EXPECT_EQ(chunks.size(), 1U);
  expect_equal(chunks[0], row(0));
  expect_equal(copy[0], row(5, {"t"}));
  expect_equal(copy[1], row(1));
}

TEST(DcpChunks, OtherDimensionsAreRefused) {
  Chunks chunks;
  EXPECT_EQ(test::thrown([&] {
              chunks.push_back({{{0, 0}, {1}}, {}});
            }).first,
            ErrorCode::invalid_argument);
  chunks.push_back(row(0));
  EXPECT_EQ(test::thrown([&] {
              chunks.push_back({{{0}, {1}}, {}});
            }).first,
            ErrorCode::invalid_argument);
  EXPECT_EQ(test::thrown([&] {
              chunks.set(0, {{{0}, {1}}, {}});
            }).first,
            ErrorCode::invalid_argument);
  EXPECT_EQ(chunks.size(), 1U);
}

}  // namespace
}  // namespace tessera::dcp
