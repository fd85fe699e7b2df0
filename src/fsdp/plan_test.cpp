#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "fsdp/flat_layout.h"
#include "fsdp/schedule.h"
#include "tessera/error.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;

std::vector<std::int64_t> rows(const FlatEntry& entry, int world) {
  std::vector<std::int64_t> counts;
  for (int r = 0; r < world; ++r) counts.push_back(entry.row_count(r));
  return counts;
}

TEST(FlatLayout, CutsRowsAsTorchChunk_T2) {
  const auto layout = make_flat_layout({{10, 2}, {5}, {1, 3}, {0, 4}}, 4, 16);
  EXPECT_THAT(rows(layout.entries[0], 4), ElementsAre(3, 3, 3, 1));
  EXPECT_THAT(rows(layout.entries[1], 4), ElementsAre(2, 2, 1, 0));
  EXPECT_THAT(rows(layout.entries[2], 4), ElementsAre(1, 0, 0, 0));
  EXPECT_THAT(rows(layout.entries[3], 4), ElementsAre(0, 0, 0, 0));
  // Ranks without rows stand at the end of the tensor (P-18).
  EXPECT_EQ(layout.entries[1].first_row(3), 5);
}

TEST(FlatLayout, PacksShardsAndAlignsGatheredParameters) {
  const auto layout = make_flat_layout({{10, 2}, {5}, {3, 3}}, 4, 16);
  EXPECT_EQ(layout.entries[1].shard_offset, 6);
  EXPECT_EQ(layout.entries[2].shard_offset, 8);
  EXPECT_EQ(layout.shard_elements, 11);
  EXPECT_EQ(layout.entries[1].gathered_offset, 32);
  EXPECT_EQ(layout.entries[2].gathered_offset, 48);
  EXPECT_EQ(layout.gathered_elements, 64);
}

TEST(FlatLayout, RefusesScalars_P1) {
  EXPECT_THROW(make_flat_layout({{}}, 2, 16), Error);
}

TEST(Schedule, AllowsTheTablesStepsOnly) {
  EXPECT_EQ(next(ParamState::sharded, ParamStep::start_gather), ParamState::gathering);
  EXPECT_EQ(next(ParamState::gathering, ParamStep::finish_gather), ParamState::full);
  EXPECT_EQ(next(ParamState::full, ParamStep::free), ParamState::sharded);
  EXPECT_THROW(static_cast<void>(next(ParamState::full, ParamStep::start_gather)), Error);
  EXPECT_THROW(static_cast<void>(next(ParamState::sharded, ParamStep::finish_gather)), Error);
  EXPECT_THROW(static_cast<void>(next(ParamState::gathering, ParamStep::free)), Error);
  EXPECT_EQ(next(GradState::collecting, GradStep::keep), GradState::idle);
  EXPECT_THROW(static_cast<void>(next(GradState::idle, GradStep::start_reduce)), Error);
  EXPECT_THROW(static_cast<void>(next(GradState::reducing, GradStep::start_reduce)), Error);
}

}  // namespace
}  // namespace tessera
