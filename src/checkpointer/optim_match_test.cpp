// Groups and state of a checkpoint's optimizer are found by the names of parameters.
#include "checkpointer/optim_match.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "conformance/errors.h"
#include "tessera/error.h"

namespace tessera {
namespace {

using detail::match_optim;
using ::testing::ElementsAre;
using Names = std::vector<std::string>;

constexpr const char* kWrapper = "_fsdp_wrapped_module.";

Value list_of(const Names& names, const std::string& prefix = "") {
  Value::List items;
  for (const auto& name : names) items.emplace_back(prefix + name);
  return Value::list(std::move(items));
}

Value group(const Names& params, double lr, double decay) {
  return Value::dict({{"lr", lr}, {"weight_decay", decay}, {"params", list_of(params)}});
}

Value optim(Value::List groups, const Value& state = Value::dict()) {
  return Value::dict({{"state", state}, {"param_groups", Value::list(std::move(groups))}});
}

Value live() {
  return optim({group({"a", "b"}, 0, 0.1), group({"c"}, 0, 0)});
}

TEST(OptimMatch, FindsGroupsByNamesWhateverTheirOrder_O42) {
  const auto match = match_optim(optim({group({"c"}, 3, 0), group({"b", "a"}, 4, 0.1)}), live());
  EXPECT_THAT(match.groups, ElementsAre(1U, 0U));
  EXPECT_EQ(match.stored.at("param_groups").at(0U).at("lr").as_real(), 4);
  EXPECT_TRUE(match.stored.at("param_groups").at(0U).at("params") == list_of({"a", "b"}));
  EXPECT_TRUE(match.orders[0] == list_of({"b", "a"}));
}

// OQ-04: names are clean before anything is looked up, so no group loses its parameters.
TEST(OptimMatch, TakesNumbersAndWrappedNames_OQ04) {
  auto numbered = [](const Names& names, std::int64_t first, double lr) {
    Value::List ids;
    for (std::size_t i = 0; i < names.size(); ++i)
      ids.emplace_back(first + static_cast<std::int64_t>(i));
    return Value::dict({{"lr", lr},
                        {"params", Value::list(std::move(ids))},
                        {"param_names", list_of(names, kWrapper)}});
  };
  auto state = Value::dict();
  state.set_item(2, Value::dict({{"step", 5}}));
  const auto match =
      match_optim(optim({numbered({"b", "a"}, 0, 1), numbered({"c"}, 2, 2)}, state), live());
  EXPECT_EQ(match.stored.at("state").at("c").at("step").as_int(), 5);
  EXPECT_EQ(step_text(match.keys.at("c")), "2");
  const auto wrapped = Value::dict({{std::string(kWrapper) + "c", Value::dict({{"step", 6}})}});
  auto named = optim({group({}, 1, 0.1), group({}, 2, 0)}, wrapped);
  named.at("param_groups").at(0U).set_item("params", list_of({"a", "b"}, kWrapper));
  named.at("param_groups").at(1U).set_item("params", list_of({"c"}, kWrapper));
  const auto again = match_optim(named, live());
  EXPECT_EQ(again.stored.at("state").at("c").at("step").as_int(), 6);
  EXPECT_EQ(step_text(again.keys.at("c")), std::string(kWrapper) + "c");
}

TEST(OptimMatch, MakesTwoGroupsOfOne_O13) {
  const auto match = match_optim(optim({group({"a", "c", "b"}, 3, 0.1)}), live());
  EXPECT_TRUE(match.is_split);
  const auto& groups = match.stored.at("param_groups");
  EXPECT_EQ(groups.at(0U).at("weight_decay").as_real(), 0.1);
  EXPECT_EQ(groups.at(1U).at("weight_decay").as_real(), 0);
  EXPECT_EQ(groups.at(1U).at("lr").as_real(), 3);
  const auto decaying = optim({group({"a", "b"}, 0, 0.1), group({"c"}, 0, 0.2)});
  EXPECT_EQ(code_of([&] {
              (void)match_optim(optim({group({"a", "b", "c"}, 3, 0.1)}), decaying);
            }),
            ErrorCode::mismatch);
}

TEST(OptimMatch, RefusesOtherGroups) {
  const auto refusal = [](Value::List groups) {
    return error_of([&] { (void)match_optim(optim(std::move(groups)), live()); });
  };
  // A parameter too few, too many, twice, in the wrong group; three groups.
  EXPECT_EQ(refusal({group({"a"}, 1, 0.1), group({"c"}, 1, 0)}).code(), ErrorCode::mismatch);
  EXPECT_EQ(refusal({group({"a", "b", "d"}, 1, 0.1), group({"c"}, 1, 0)}).code(),
            ErrorCode::mismatch);
  EXPECT_EQ(refusal({group({"a", "b", "a"}, 1, 0.1), group({"c"}, 1, 0)}).code(),
            ErrorCode::mismatch);
  EXPECT_EQ(refusal({group({"a", "c"}, 1, 0.1), group({"b"}, 1, 0)}).code(), ErrorCode::mismatch);
  EXPECT_EQ(refusal({group({"a", "b", "c"}, 1, 0.1), group({}, 1, 0)}).code(), ErrorCode::mismatch);
  EXPECT_EQ(refusal({group({"a"}, 1, 0.1), group({"b"}, 1, 0), group({"c"}, 1, 0)}).code(),
            ErrorCode::mismatch);
  EXPECT_EQ(refusal({group({"a"}, 1, 0.1)}).code(), ErrorCode::mismatch);
  EXPECT_EQ(code_of([] { (void)match_optim(Value::dict(), live()); }), ErrorCode::not_found);
  // Numbers without names.
  auto numbers = group({}, 1, 0.1);
  numbers.set_item("params", Value::list({0, 1}));
  EXPECT_EQ(refusal({numbers, group({"c"}, 1, 0)}).code(), ErrorCode::mismatch);
}

}  // namespace
}  // namespace tessera
