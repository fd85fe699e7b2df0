// Spec P-10, P-11: names of leaves.
#include <gtest/gtest.h>

#include "tessera/error.h"
#include "tessera/leaf.h"

namespace tessera {
namespace {

Value tensor() {
  return Value(Tensor());
}

using Names = std::vector<std::string>;

Names names(const Value& tree, FlattenRule rule = FlattenRule::current) {
  Names result;
  for (const Leaf& leaf : flatten(tree, rule)) result.push_back(leaf.name);
  return result;
}

Path path(std::string key, PathPart next) {
  Path made;
  made.emplace_back(std::move(key));
  made.push_back(std::move(next));
  return made;
}

ErrorCode unflatten_error(const std::vector<Leaf>& leaves) {
  try {
    (void)unflatten(leaves);
  } catch (const Error& error) {
    return error.code();
  }
  ADD_FAILURE() << "nothing was thrown";
  return ErrorCode::invalid_argument;
}

TEST(Flatten, P10ListsAreDescendedOnlyForTensorsAndDicts) {
  const Value tree = Value::dict({
      {"model", Value::dict({{"w", tensor()}, {"b", Value::list({tensor(), 1})}})},
      {"plain", Value::list({1, 2})},
      {"nested", Value::list({Value::list({Value::dict({{"x", 1}})}), 2})},
      {"tuple", Value::tuple({tensor()})},
      {"empty list", Value::list()},
      {"empty dict", Value::dict()},
      {Value(3), Value::dict({{Value(true), "int and bool keys"}})},
  });
  EXPECT_EQ(names(tree), (Names{"model.w", "model.b.0", "model.b.1", "plain", "nested.0.0.x",
                                "nested.1", "tuple", "empty list", "3.True"}));
}

TEST(Flatten, P10PathKeepsListIndices) {
  const auto leaves = flatten(Value::dict({{"a", Value::list({tensor()})}, {"b", 1}}));
  ASSERT_EQ(leaves.size(), 2U);
  EXPECT_EQ(leaves[0].path, path("a", std::int64_t{0}));
  EXPECT_EQ(leaves[1].path, Path(1, "b"));
}

TEST(Flatten, P11OldRuleKeepsDictsWithoutTensorsWhole) {
  const Value tree = Value::dict({
      {"optim", Value::dict({{"state", Value::dict({{"w", tensor()}})},
                             {"param_groups", Value::list({Value::dict({{"lr", 0.1}})})},
                             {"cfg", Value::dict({{"a", 1}})}})},
  });
  EXPECT_EQ(names(tree, FlattenRule::before_2_4),
            (Names{"optim.state.w", "optim.param_groups", "optim.cfg"}));
  EXPECT_EQ(names(tree), (Names{"optim.state.w", "optim.param_groups.0.lr", "optim.cfg.a"}));
}

TEST(Flatten, P10CollisionIsAConflictWithTheName) {
  try {
    (void)flatten(Value::dict({{"a.b", 1}, {"a", Value::dict({{"b", 2}})}}));
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::conflict);
    EXPECT_EQ(error.key(), "a.b");
  }
}

TEST(Unflatten, RestoresTheTree) {
  const Value tree = Value::dict({
      {"model",
       Value::dict({{"w", tensor()}, {"l", Value::list({tensor(), Value::dict({{"x", 1}})})}})},
      {"step", 7},
      {"empty", Value::list()},
  });
  EXPECT_EQ(unflatten(flatten(tree)), tree);
  EXPECT_EQ(unflatten(flatten(Value::list({tensor(), 2}))), Value::list({tensor(), 2}));
  EXPECT_EQ(unflatten(flatten(Value(7))), Value(7));
  EXPECT_EQ(unflatten({}), Value::dict());
}

TEST(Unflatten, ALeafWithoutPathGoesUnderItsName) {
  EXPECT_EQ(unflatten({{"a.b", {}, 1}}), Value::dict({{"a.b", 1}}));
}

TEST(Unflatten, HolesAndClashesAreErrors) {
  const std::int64_t one = 1;
  EXPECT_EQ(unflatten_error({{"a.1", path("a", one), 1}, {"b", Path(1, "b"), 2}}),
            ErrorCode::incomplete);
  EXPECT_EQ(unflatten_error({{"a.9", path("a", std::int64_t{1} << 60), 1}}), ErrorCode::incomplete);
  EXPECT_EQ(unflatten_error({{"a", Path(1, "a"), 1}, {"a.b", path("a", "b"), 2}}),
            ErrorCode::conflict);
  EXPECT_EQ(unflatten_error({{"a", Path(1, "a"), Value::dict()}, {"a.b", path("a", "b"), 2}}),
            ErrorCode::conflict);
  EXPECT_EQ(unflatten_error({{"a.b", path("a", "b"), 2}, {"a", Path(1, "a"), 1}}),
            ErrorCode::conflict);
  EXPECT_EQ(unflatten_error({{"a.b", path("a", "b"), 2}, {"a.1", path("a", one), 1}}),
            ErrorCode::conflict);
}

}  // namespace
}  // namespace tessera
