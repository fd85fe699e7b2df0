// The plan that each rank makes for itself is its part of the plan that rank 0 makes for all.
#include "checkpoint/save/save_plan.h"

#include <gtest/gtest.h>

#include <compare>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "layout/boxes.h"

namespace tessera {
namespace {

// Leaf, where its box begins, file, offset, length.
using Written = std::tuple<std::size_t, Shape, int, std::uint64_t, std::uint64_t>;

std::vector<std::vector<HeldChunk>> held_by(int rank, const std::vector<PlannedLeaf>& leaves) {
  std::vector<std::vector<HeldChunk>> held;
  for (const PlannedLeaf& leaf : leaves) {
    held.emplace_back();
    if (!leaf.is_tensor) continue;
    for (Box& box : boxes_of_part(*leaf.placement, leaf.shape, part_of_rank(*leaf.placement, rank)))
      held.back().push_back({std::move(box), 0});
  }
  return held;
}

std::uint64_t value_length(std::size_t leaf) {
  return 100 + leaf;
}

std::set<Written> written_by(int rank, const PlanRules& rules,
                             const std::vector<PlannedLeaf>& leaves) {
  const auto held = held_by(rank, leaves);
  std::set<Written> written;
  for (const OwnItem& item : own_plan(rules, {rank, leaves, held, value_length}, {}).items) {
    if (!item.is_written) continue;
    written.emplace(item.leaf, item.chunk.box.offsets, item.place.file, item.place.offset,
                    item.place.length);
  }
  return written;
}

class Drawn {
 public:
  explicit Drawn(unsigned seed) : random_(seed) {}
  int number(int low, int high) { return std::uniform_int_distribution<int>(low, high)(random_); }
  bool coin() { return number(0, 1) == 1; }

  // A tensor that ranks hold by a rule, often each its own part; or a value.
  PlannedLeaf leaf(int ranks) {
    PlannedLeaf leaf;
    leaf.name = "leaf" + std::to_string(number(0, 1 << 20));
    leaf.is_tensor = number(0, 9) > 0;
    if (!leaf.is_tensor) return leaf;
    leaf.dtype = coin() ? DType::float32 : DType::int8;
    leaf.shape.resize(static_cast<std::size_t>(number(0, 3)));
    for (auto& size : leaf.shape) size = number(0, 9);
    leaf.placement =
        Placement{.parts = number(0, 2) > 0 ? ranks : number(1, ranks), .stride = number(1, 2)};
    if (coin()) leaf.placement->shard = number(1, 300), leaf.placement->begin = number(0, 100);
    if (!leaf.shape.empty())
      leaf.placement->dim = number(0, static_cast<int>(leaf.shape.size()) - 1);
    if (leaf.placement->parts == ranks) leaf.placement->stride = 1;
    if (!fits(*leaf.placement, leaf.shape, ranks)) leaf.placement = Placement{};
    return leaf;
  }

  PlanRules rules() {
    PlanRules rules{.ranks = number(1, 9)};
    rules.files.most = number(1, 3);
    rules.files.one_an_item = number(0, 4) == 0;
    if (number(0, 3) == 0) rules.replicas = ReplicaWriter::lowest_rank;
    if (number(0, 3) == 0)
      rules.writer = [](const std::string& key, std::span<const int> holders) {
        return holders[key.size() % holders.size()];
      };
    return rules;
  }

 private:
  std::mt19937 random_;
};

TEST(SavePlan, EachRankComputesItsPartOfThePlanOfAll) {
  std::size_t replicated = 0;
  for (unsigned seed = 0; seed < 500; ++seed) {
    Drawn drawn(seed);
    const PlanRules rules = drawn.rules();
    std::vector<PlannedLeaf> leaves(static_cast<std::size_t>(drawn.number(1, 20)));
    for (PlannedLeaf& leaf : leaves) leaf = drawn.leaf(rules.ranks);
    const SavePlan plan(rules, ToldLeaves(leaves, false), value_length);
    std::vector<std::set<Written>> of_all(static_cast<std::size_t>(rules.ranks));
    SavePlan::Items items(plan);
    while (items.next() < leaves.size()) {
      const std::size_t leaf = items.next();
      items.leaf([&](const Box* box, int rank, const ItemPlace& place) {
        of_all.at(static_cast<std::size_t>(rank))
            .emplace(leaf, box == nullptr ? Shape() : box->offsets, place.file, place.offset,
                     place.length);
      });
    }
    for (const PlannedLeaf& leaf : leaves)
      if (leaf.placement && leaf.placement->parts < rules.ranks) ++replicated;
    for (int rank = 0; rank < rules.ranks; ++rank)
      EXPECT_EQ(written_by(rank, rules, leaves), of_all[static_cast<std::size_t>(rank)])
          << "seed " << seed << ", rank " << rank;
  }
  EXPECT_GT(replicated, 1000U);
}

// A rank that went through the parts of all would not end: there are 10^12.
TEST(SavePlan, ARankDoesNotGoThroughThePartsOfAllOthers) {
  const int ranks = 1 << 30;
  std::vector<PlannedLeaf> leaves(1000);
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    leaves[i].name = "leaf" + std::to_string(i);
    leaves[i].is_tensor = true;
    leaves[i].shape = {ranks, 4};
    leaves[i].placement = Placement{.parts = ranks};
  }
  EXPECT_EQ(written_by(ranks - 5, {.ranks = ranks}, leaves).size(), leaves.size());
}

}  // namespace
}  // namespace tessera
