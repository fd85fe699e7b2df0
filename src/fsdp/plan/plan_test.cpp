#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "fsdp/plan/schedule.h"
#include "fsdp/plan/unit_layout.h"
#include "layout/boxes.h"
#include "tessera/error.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;

std::vector<std::int64_t> rows(const UnitLayout& layout, std::size_t param) {
  std::vector<std::int64_t> counts;
  for (const auto& parts : layout.parts) counts.push_back(array_of(parts[param].slice).front());
  return counts;
}

TEST(RowsLayout, CutsRowsAsTorchChunk_T2) {
  const auto layout = rows_layout({{10, 2}, {5}, {1, 3}, {0, 4}}, 4, 16);
  EXPECT_THAT(rows(layout, 0), ElementsAre(3, 3, 3, 1));
  EXPECT_THAT(rows(layout, 1), ElementsAre(2, 2, 1, 0));
  EXPECT_THAT(rows(layout, 2), ElementsAre(1, 0, 0, 0));
  EXPECT_THAT(rows(layout, 3), ElementsAre(0, 0, 0, 0));
  // Ranks without rows stand at the end of the tensor (P-18).
  EXPECT_EQ(chunk_begin(5, 4, 3), 5);
}

TEST(RowsLayout, PacksShardsAndAlignsGatheredParameters) {
  const auto layout = rows_layout({{10, 2}, {5}, {3, 3}}, 4, 16);
  EXPECT_EQ(layout.parts[0][1].base, 6);
  EXPECT_EQ(layout.parts[3][2].base, 8);
  EXPECT_EQ(layout.shard_elements, 11);
  EXPECT_EQ(layout.params[1].gathered_offset, 32);
  EXPECT_EQ(layout.params[2].gathered_offset, 48);
  EXPECT_EQ(layout.gathered_elements, 64);
  ASSERT_EQ(layout.runs[3].size(), 1u);  // one row of the first parameter, none of the others
  EXPECT_EQ(layout.runs[3][0].global, 18);
  EXPECT_EQ(layout.runs[3][0].count, 2);
}

TEST(RowsLayout, FindsTheFirstRunThatAPartTouches) {
  const auto layout = rows_layout({{8}, {8}}, 4, 1);  // runs [0, 2) and [2, 4) on every rank
  const auto& runs = layout.runs[1];
  const auto index = [&](std::int64_t begin) { return first_run(runs, begin) - runs.begin(); };
  EXPECT_EQ(index(0), 0);
  EXPECT_EQ(index(1), 0);
  EXPECT_EQ(index(2), 1);
  EXPECT_EQ(index(3), 1);
  EXPECT_EQ(index(4), 2);
}

TEST(RowsLayout, RefusesScalars_P1) {
  EXPECT_THROW(static_cast<void>(rows_layout({{}}, 2, 16)), Error);
}

TEST(FlatLayout, CutsEndToEndParametersIntoEqualRanges_T2) {
  const auto layout = flat_layout({{5, 3}, {5}}, 3, 0);  // 20 elements: 7, 7, 6 and one of zeros
  EXPECT_EQ(layout.shard_elements, 7);
  EXPECT_EQ(layout.params[1].gathered_offset, 15);
  ASSERT_EQ(layout.runs[2].size(), 2u);
  EXPECT_EQ(layout.runs[2][0].global, 14);
  EXPECT_EQ(layout.runs[2][0].count, 1);
  EXPECT_EQ(layout.runs[2][1].local, 1);
  EXPECT_EQ(layout.runs[2][1].count, 5);
  EXPECT_TRUE(layout.padding[2].empty());
  // Five elements on four ranks leave the last without any.
  const auto small = flat_layout({{5}}, 4, 0);
  EXPECT_TRUE(small.runs[3].empty());
  EXPECT_THAT(array_of(small.parts[3][0].slice), ElementsAre(0));
}

TEST(FlatLayout, AlignsOriginalParametersAndPadsToTheWorld_UO4_K9) {
  const auto layout = flat_layout({{3}, {5}}, 3, 4);  // 3, one of padding, 5, and no more: 9
  EXPECT_EQ(layout.params[1].gathered_offset, 4);
  EXPECT_EQ(layout.shard_elements, 3);
  ASSERT_EQ(layout.padding[1].size(), 1u);
  EXPECT_EQ(layout.padding[1][0], (FlatRange{0, 1}));
  EXPECT_TRUE(layout.padding[2].empty());
  const auto odd = flat_layout({{3}, {4}}, 3, 4);  // 8 elements, padded to 9
  ASSERT_EQ(odd.padding[2].size(), 1u);
  EXPECT_EQ(odd.padding[2][0], (FlatRange{2, 3}));
}

TEST(AlignedLayout, StartsParametersAndShardsAtMultiples) {
  const auto layout = aligned_layout({{3}, {5}, {0, 2}, {9}}, 2, 4);  // 3+1, 5+3, 9, and 3: 24
  EXPECT_EQ(layout.gathered_elements, 24);
  EXPECT_EQ(layout.shard_elements, 12);
  EXPECT_TRUE(layout.is_end_to_end);
  EXPECT_EQ(layout.params[1].gathered_offset, 4);
  EXPECT_EQ(layout.params[3].gathered_offset, 12);
  EXPECT_EQ(layout.parts[1][3].base, 0);
  EXPECT_EQ(numel(layout.parts[0][3].slice), 0);
  for (const auto& padding : layout.padding) EXPECT_TRUE(padding.empty());
  // Two of four ranks have the same array.
  const auto half = over_fewer_ranks(aligned_layout({{3}, {5}}, 4, 2), 2);
  EXPECT_EQ(half.gathered_elements, 16);
  EXPECT_EQ(half.params[1].gathered_offset, 4);
  EXPECT_EQ(half.shard_elements, 8);
  ASSERT_EQ(half.runs[1].size(), 1u);
  EXPECT_EQ(half.runs[1][0].global, 4);
  EXPECT_EQ(aligned_layout({{0, 3}}, 3, 4).gathered_elements, 0);
}

TEST(AlignedLayout, PacksSomeParametersAsTheRanksHoldThem) {
  const auto layout = aligned_layout({{3}, {5}, {6}}, 2, 2);  // 0 to 3, 4 to 9, 10 to 16: 8 a rank
  const auto some = packed(layout, {0, 2});
  ASSERT_EQ(some.params.size(), 2u);
  EXPECT_EQ(some.shard_elements, 6);  // rank 1 has all of the last one
  ASSERT_EQ(some.runs[0].size(), 1u);
  EXPECT_EQ(some.runs[0][0].param, 0u);
  ASSERT_EQ(some.runs[1].size(), 1u);
  EXPECT_EQ(some.runs[1][0].param, 1u);
  EXPECT_EQ(some.runs[1][0].local, 0);
  EXPECT_EQ(some.parts[1][1].base, 0);
  EXPECT_FALSE(some.is_end_to_end);
  const auto split = packed(layout, {1});  // 4 elements on rank 0, one on rank 1
  EXPECT_EQ(split.shard_elements, 4);
  EXPECT_EQ(split.runs[1][0].global, 4);
}

TEST(Schedule, AllowsTheTablesStepsOnly) {
  EXPECT_EQ(next(ParamState::sharded, ParamStep::start_gather), ParamState::gathering);
  EXPECT_EQ(next(ParamState::gathering, ParamStep::finish_gather), ParamState::full);
  EXPECT_EQ(next(ParamState::full, ParamStep::free), ParamState::sharded);
  EXPECT_THROW(static_cast<void>(next(ParamState::full, ParamStep::start_gather)), Error);
  EXPECT_THROW(static_cast<void>(next(ParamState::sharded, ParamStep::finish_gather)), Error);
  EXPECT_THROW(static_cast<void>(next(ParamState::gathering, ParamStep::free)), Error);
  EXPECT_EQ(next(ParamState::full, ParamStep::park), ParamState::parked);
  EXPECT_EQ(next(ParamState::parked, ParamStep::start_gather), ParamState::gathering);
  EXPECT_EQ(next(ParamState::parked, ParamStep::free), ParamState::sharded);
  EXPECT_THROW(static_cast<void>(next(ParamState::sharded, ParamStep::park)), Error);
  EXPECT_EQ(next(ParamState::sharded, ParamStep::show), ParamState::shown);
  EXPECT_EQ(next(ParamState::shown, ParamStep::hide), ParamState::sharded);
  EXPECT_THROW(static_cast<void>(next(ParamState::full, ParamStep::show)), Error);
  EXPECT_THROW(static_cast<void>(next(ParamState::shown, ParamStep::start_gather)), Error);
  EXPECT_EQ(next(GradState::collecting, GradStep::keep), GradState::idle);
  for (const auto state : {GradState::idle, GradState::collecting, GradState::reducing})
    EXPECT_EQ(next(state, GradStep::forget), GradState::idle);
  EXPECT_THROW(static_cast<void>(next(GradState::idle, GradStep::start_reduce)), Error);
  EXPECT_THROW(static_cast<void>(next(GradState::reducing, GradStep::start_reduce)), Error);
}

}  // namespace
}  // namespace tessera
