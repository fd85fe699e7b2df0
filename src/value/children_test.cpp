#include "value/children.h"

#include <algorithm>
#include <functional>
#include <random>

#include <gtest/gtest.h>

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

Value tensor_of(const std::shared_ptr<Storage>& storage) {
  Tensor tensor;
  tensor.shape = {2};
  tensor.pieces.push_back({whole({2}), storage, 0, {}, -1});
  tensor.attributes = std::make_shared<const Value>(Value::dict({{"note", "x"}}));
  return Value(std::move(tensor));
}

TEST(CopyTree, ChangesOfOneLeaveTheOther) {
  const auto storage = std::make_shared<Storage>();
  const Value tensor = tensor_of(storage);
  Value tree = Value::dict({{"w", tensor}, {"l", Value::list({1, Value::tuple({tensor})})}},
                           DictKind::ordered_dict);
  tree.set_container_state(Value::dict({{"v", 1}}));
  Value copy = copy_tree(tree);
  EXPECT_TRUE(copy == tree);
  // As in the tree, both places hold one tensor.
  const Value in_tuple = copy.at("l").items()[1].items()[0];
  EXPECT_EQ(in_tuple.identity(), copy.at("w").identity());
  Value changed = copy.at("w");
  changed.as_tensor().shape = {3};
  changed.as_tensor().pieces[0].storage->offset = 7;
  Value list = copy.at("l");
  list.items().clear();
  Value state = *copy.container_state();
  state.set_item("v", 2);
  EXPECT_EQ(tensor.as_tensor().shape, Shape{2});
  EXPECT_EQ(storage->offset, 0U);
  EXPECT_EQ(tree.at("l").size(), 2U);
  EXPECT_EQ(tree.container_state()->at("v").as_int(), 1);
}

// A random tree of every kind of node, in which nodes are shared now and then.
class Trees {
 public:
  explicit Trees(unsigned seed) : random_(seed) {}

  Value any(int depth) {
    if (!made_.empty() && draw(6) == 0) return made_[draw(made_.size())];
    Value value = depth == 0 ? leaf() : container(depth);
    made_.push_back(value);
    return value;
  }

 private:
  std::size_t draw(std::size_t below) { return random_() % below; }

  Value leaf() {
    switch (draw(5)) {
      case 0:
        return {};
      case 1:
        return Value(static_cast<int>(draw(1000)));
      case 2:
        return Value(std::string(draw(4), 'x'));
      case 3:
        return Value::global("module", "name");
      default:
        return tensor_of(storages_[draw(storages_.size())]);
    }
  }

  std::vector<Value> some(int depth) {
    std::vector<Value> items;
    for (std::size_t i = draw(4); i > 0; --i) items.push_back(any(depth - 1));
    return items;
  }

  std::vector<Value::Pair> pairs(int depth) {
    std::vector<Value::Pair> made;
    for (std::size_t i = draw(4); i > 0; --i)
      made.emplace_back("k" + std::to_string(i), any(depth - 1));
    return made;
  }

  Value container(int depth) {
    switch (draw(6)) {
      case 0:
        return Value::list(some(depth));
      case 1:
        return Value::tuple(some(depth));
      case 2:
        return Value::set({Value(1), Value("a")});
      case 3:
        return Value::object({.callable = Value::global("m", "C"),
                              .arguments = Value::tuple(some(depth)),
                              .state = any(depth - 1),
                              .list_items = some(depth),
                              .dict_items = pairs(depth)});
      default: {
        Value dict = Value::dict(pairs(depth), DictKind::default_dict);
        if (draw(2) == 0) dict.set_default_factory(Value::global("builtins", "list"));
        return dict;
      }
    }
  }

  std::mt19937 random_;
  std::vector<Value> made_;
  std::vector<std::shared_ptr<Storage>> storages_ = {std::make_shared<Storage>(),
                                                     std::make_shared<Storage>()};
};

TEST(CopyTree, IsEqualAndSharesNothingThatCanChange) {
  for (unsigned seed = 0; seed < 300; ++seed) {
    const Value tree = Trees(seed).any(5);
    std::vector<const void*> nodes;
    const Value copy = copy_tree(tree, [&](const Value& node) {
      nodes.push_back(node.identity());
      return std::nullopt;
    });
    EXPECT_TRUE(copy == tree) << seed;
    std::vector<const void*> copied;
    (void)copy_tree(copy, [&](const Value& node) {
      copied.push_back(node.identity());
      return std::nullopt;
    });
    EXPECT_EQ(copied.size(), nodes.size()) << seed;  // shared as often
    std::sort(nodes.begin(), nodes.end());
    for (const void* node : copied)
      EXPECT_FALSE(std::binary_search(nodes.begin(), nodes.end(), node)) << seed;
  }
}

}  // namespace
}  // namespace tessera
