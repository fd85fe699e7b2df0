#include "comm/tree_links.h"

#include <numeric>
#include <string>

#include <gtest/gtest.h>

#include "comm/message.h"

namespace tessera {
namespace {

Bytes in_brackets(const Bytes& left, const Bytes& right) {
  return to_bytes(to_text(left) + " " + to_text(right));
}

TEST(Tree, EveryRankIsTheChildOfItsParentOnce) {
  for (const int size : {1, 2, 3, 32, 33, 34, 66, 1000, 65536}) {
    std::vector<int> parents(static_cast<std::size_t>(size), -1);
    for (int rank = 0; rank < size; ++rank) {
      const TreePlace place = place_in_tree(rank, size);
      EXPECT_LE(place.children.size(), static_cast<std::size_t>(kFanOut));
      EXPECT_EQ(place.parent, parents[static_cast<std::size_t>(rank)]) << rank << " of " << size;
      for (const int child : place.children) {
        EXPECT_EQ(parents[static_cast<std::size_t>(child)], -1) << child;
        parents[static_cast<std::size_t>(child)] = rank;
      }
    }
    EXPECT_EQ(std::count(parents.begin(), parents.end(), -1), 1) << size;
  }
}

TEST(Tree, ManyRanksAreFewStepsAway) {
  const int size = 65536;
  int deepest = 0;
  for (int rank = 0; rank < size; ++rank) {
    int depth = 0;
    for (int at = rank; at != 0; at = place_in_tree(at, size).parent) ++depth;
    deepest = std::max(deepest, depth);
  }
  EXPECT_LE(deepest, 4);
}

TEST(Tree, MessagesCombineInRankOrder) {
  for (const int size : {1, 2, 33, 100, 1100}) {
    std::vector<Bytes> messages;
    std::string expected;
    for (int rank = 0; rank < size; ++rank) {
      messages.push_back(to_bytes(std::to_string(rank)));
      expected += (rank > 0 ? " " : "") + std::to_string(rank);
    }
    EXPECT_EQ(to_text(fold_along_tree(messages, in_brackets)), expected);
  }
}

}  // namespace
}  // namespace tessera
