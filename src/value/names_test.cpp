// What names of leaves tell. The file is short: the rules are.
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>
#include <vector>

#include "tessera/leaf.h"

namespace tessera {
namespace {

using NameList = std::vector<std::string>;

TEST(Names, OfAnOptimizer) {
  for (const char* name :
       {"optim.state.w", "optimizer", "run.optim.lr", "w.exp_avg", "w.exp_avg_sq", "optimizers.0",
        "optimizer_state_dict.state", "a.optim_0.b", "optim2"})
    EXPECT_TRUE(is_optimizer_name(name)) << name;
  for (const char* name : {"model.w", "exp_avg", "w.exp_avgs", "nooptim", "model.optimal_transport",
                           "optimism", "optimized.w"})
    EXPECT_FALSE(is_optimizer_name(name)) << name;
}

TEST(Names, OfRanks) {
  const NameList names = {"dataloader.dp_rank_0",
                          "dataloader.dp_rank_1.offset",
                          "rng.rank0",
                          "layers.low_rank_1.weight",
                          "layers.low_rank_2.weight",
                          "w.lowrank_4",
                          "frank2",
                          "w.rank",
                          "model.rank_x"};
  const std::map<std::string, std::set<int>> expected = {{"dataloader.dp_rank_", {0, 1}},
                                                         {"rng.rank", {0}}};
  EXPECT_EQ(keys_of_ranks(names), expected);
}

TEST(Names, OfRanksThatNobodyGoesOnWith) {
  const NameList taken = {"data.dp_rank_0", "data.dp_rank_1.a", "w"};
  const NameList notes = notes_of_left_ranks(
      taken, {"data.dp_rank_1.b", "data.dp_rank_2", "data.dp_rank_3", "rng.rank_0", "bias"});
  ASSERT_EQ(notes.size(), 1U);
  EXPECT_EQ(notes[0],
            "the checkpoint has data.dp_rank_0 to data.dp_rank_3, what 4 ranks had of their own: 2 "
            "of these are loaded, and nobody goes on with the others");
  EXPECT_TRUE(notes_of_left_ranks(taken, {"data.dp_rank_1.b", "data.dp_rank_0.c"}).empty());
  const NameList others = {"data.dp_rank_1", "data.dp_rank_2", "data.dp_rank_3"};
  EXPECT_EQ(notes_of_left_ranks({"data.dp_rank_0"}, others, 3).size(), 1U);
  EXPECT_TRUE(notes_of_left_ranks({"data.dp_rank_0"}, others, 4).empty());
  EXPECT_TRUE(notes_of_left_ranks({"w"}, {"data.dp_rank_0"}).empty());
  EXPECT_TRUE(notes_of_left_ranks({"w.low_rank_1"}, {"w.low_rank_2"}).empty());
}

}  // namespace
}  // namespace tessera
