#include "value/depth.h"

#include <gtest/gtest.h>

#include <functional>
#include <random>

#include "conformance/errors.h"
#include "tessera/leaf.h"

namespace tessera {
namespace {

// `levels` containers inside one another, each made by `wrap`.
Value nested(std::size_t levels, const std::function<Value(Value)>& wrap) {
  Value value(1);
  for (std::size_t i = 0; i < levels; ++i) value = wrap(std::move(value));
  return value;
}

Value in_list(Value value) {
  return Value::list({std::move(value)});
}

Value in_dict(Value value) {
  return Value::dict({{"a", std::move(value)}});
}

Value in_object(Value value) {
  return Value::object(
      {.callable = Value::global("m", "C"), .arguments = Value::tuple(), .state = value});
}

TEST(Depth, LevelsHaveALimit) {
  for (const auto& wrap : {&in_list, &in_dict, &in_object}) {
    require_walkable(nested(kMaxLevels - 1, wrap));  // an object has one level more: its arguments
    EXPECT_EQ(code_of([&] { require_walkable(nested(kMaxLevels + 1, wrap)); }), ErrorCode::limit);
    EXPECT_EQ(code_of([&] { require_walkable(nested(100'000, wrap)); }), ErrorCode::limit);
  }
}

TEST(Depth, AValueThatContainsItselfIsRefused) {
  Value tree = Value::dict({{"x", Value::list({1, Value::dict()})}});
  Value inner = tree.at("x");
  inner.items()[1].set_item("y", tree);
  const Error error = error_of([&] { require_walkable(tree); });
  EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
  EXPECT_EQ(error.key(), "x.1.y");
  EXPECT_EQ(code_of([&] { (void)flatten(tree); }), ErrorCode::invalid_argument);
  inner.items()[1].set_item("y", 0);  // or it would never be freed
}

// Shared nodes are no cycles, and are walked once: 2^60 paths lead to the last one here.
TEST(Depth, SharedNodesAreWalkedOnce) {
  require_walkable(nested(60, [](const Value& value) { return Value::list({value, value}); }));
  // A shared part is as deep below its second place.
  const Value part = nested(kMaxLevels - 1, in_list);
  require_walkable(Value::list({part, part}));
  EXPECT_EQ(code_of([&] {
              require_walkable(Value::list({part, in_list(part)}));
            }),
            ErrorCode::limit);
}

// Random graphs: a cycle is found exactly when there is one, by a count of edges that can be taken
// away.
TEST(Depth, FindsACycleExactlyWhereThereIsOne) {
  std::mt19937 random(7);
  int with_cycle = 0;
  for (int round = 0; round < 500; ++round) {
    const std::size_t count = 2 + random() % 6;
    std::vector<Value> nodes;
    for (std::size_t i = 0; i < count; ++i) nodes.push_back(Value::list());
    std::vector<std::vector<std::size_t>> edges(count);
    for (std::size_t edge = 0; edge < count; ++edge) {
      const std::size_t from = random() % count;
      const std::size_t to = random() % count;
      edges[from].push_back(to);
      nodes[from].items().push_back(nodes[to]);
    }
    // reaches[i][j]: by one edge or more.
    std::vector<std::vector<bool>> reaches(count, std::vector<bool>(count));
    for (std::size_t i = 0; i < count; ++i) {
      for (const std::size_t to : edges[i]) reaches[i][to] = true;
    }
    for (std::size_t k = 0; k < count; ++k) {
      for (std::size_t i = 0; i < count; ++i) {
        for (std::size_t j = 0; j < count; ++j)
          reaches[i][j] = reaches[i][j] || (reaches[i][k] && reaches[k][j]);
      }
    }
    bool cycle = reaches[0][0];
    for (std::size_t i = 0; i < count; ++i) cycle = cycle || (reaches[0][i] && reaches[i][i]);
    with_cycle += cycle ? 1 : 0;
    bool refused = false;
    try {
      require_walkable(nodes[0]);
    } catch (const Error& error) {
      refused = error.code() == ErrorCode::invalid_argument;
    }
    EXPECT_EQ(refused, cycle) << round;
    for (Value& node : nodes) node.items().clear();
  }
  EXPECT_GT(with_cycle, 50);
  EXPECT_LT(with_cycle, 450);
}

}  // namespace
}  // namespace tessera
