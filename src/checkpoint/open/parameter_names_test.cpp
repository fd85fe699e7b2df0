#include <gtest/gtest.h>

#include "checkpoint/test_support.h"
#include "tessera/restore.h"

namespace tessera {

// Names of parameters, and the groups of an optimizer, of one training that another one takes up:
// O-13, O-41, O-42.

namespace {

using Names = std::vector<std::string>;
using Matches = std::map<std::string, std::string>;

Matches matched(const Names& stored, const Names& live) {
  return match_names(stored, live, olmo_name_rules());
}

TEST(ParameterNames, LoseTheirWrappersBeforeTheyAreMapped) {
  const std::string wrapped =
      "_fsdp_wrapped_module.transformer.blocks.0._fsdp_wrapped_module.norm.weight";
  EXPECT_EQ(matched({wrapped, "_fsdp_wrapped_module"},
                    {"transformer.blocks.0.ff_norm.weight",
                     "_fsdp_wrapped_module.transformer.blocks.0.attn_norm.weight",
                     "_fsdp_wrapped_module", "transformer.blocks.0.ff_norm.bias"}),
            (Matches{{"transformer.blocks.0.ff_norm.weight", wrapped},
                     {"_fsdp_wrapped_module.transformer.blocks.0.attn_norm.weight", wrapped},
                     {"_fsdp_wrapped_module", "_fsdp_wrapped_module"}}));  // OQ-14 stands
  EXPECT_EQ(code_of([] {
              (void)matched({"a", "_fsdp_wrapped_module.a"}, {"a"});
            }),
            ErrorCode::conflict);
}

TEST(ParameterNames, OneNormBecomesTwo) {
  for (const std::string kind : {"weight", "bias"}) {
    const std::string norm = "transformer.blocks.3.norm." + kind;
    const std::string attention = "transformer.blocks.3.attn_norm." + kind;
    const std::string feed = "transformer.blocks.3.ff_norm." + kind;
    EXPECT_EQ(matched({norm, "transformer.ln_f.weight"}, {attention, feed}),
              (Matches{{attention, norm}, {feed, norm}}));
    // Who has its own name takes that.
    EXPECT_EQ(matched({norm, attention}, {attention, norm}),
              (Matches{{attention, attention}, {norm, norm}}));
  }
}

// A name of block `number`, in groups of `size` or, with 0, in one list.
std::string block(int number, int size) {
  const std::string rest = ".attn_out.weight";
  if (size == 0) return "transformer.blocks." + std::to_string(number) + rest;
  return "transformer.block_groups." + std::to_string(number / size) + "." +
         std::to_string(number % size) + rest;
}

Names blocks(int count, int size) {
  Names names;
  for (int i = 0; i < count; ++i) names.push_back(block(i, size));
  return names;
}

TEST(ParameterNames, BlocksComeFromGroupsOfAnySize) {
  constexpr int kBlocks = 12;
  for (const int stored : {0, 1, 2, 3, 4, 12}) {
    for (const int live : {0, 1, 2, 3, 5, 12}) {
      Matches expected;
      for (int i = 0; i < kBlocks; ++i) expected[block(i, live)] = block(i, stored);
      EXPECT_EQ(matched(blocks(kBlocks, stored), blocks(kBlocks, live)), expected)
          << stored << " to " << live;
    }
  }
  // Both at once.
  EXPECT_EQ(matched({"transformer.block_groups.1.1.norm.weight"},
                    {"transformer.blocks.3.ff_norm.weight"}),
            (Matches{{"transformer.blocks.3.ff_norm.weight",
                      "transformer.block_groups.1.1.norm.weight"}}));
  // What has no numbers is no block.
  EXPECT_EQ(matched({"transformer.block_groups.0.x.w", "transformer.block_groups.01.0.w"},
                    {"transformer.blocks.0.w", "transformer.blocks.1.w"}),
            Matches());
}

TEST(ParameterNames, CallersAddRules) {
  NameRules rules = olmo_name_rules();
  rules.wrappers.emplace_back("_orig_mod.");
  rules.renamed.push_back({"head", {"lm_head"}});
  rules.blocks.push_back({"h", "g"});
  EXPECT_EQ(match_names({"_orig_mod.head", "g.1.1.w"}, {"lm_head", "h.3.w"}, rules),
            (Matches{{"lm_head", "_orig_mod.head"}, {"h.3.w", "g.1.1.w"}}));
  rules.renamed = {{"*.a.*", {"b"}}};
  EXPECT_EQ(code_of([&] { (void)match_names({"x"}, {"b"}, rules); }), ErrorCode::invalid_argument);
}

Value group(const Names& names, std::vector<Value::Pair> settings) {
  settings.emplace_back("params", Value::list({names.begin(), names.end()}));
  return Value::dict(std::move(settings));
}

TEST(FitGroups, GroupsAreFoundByTheNamesInThem) {
  const Value stored = Value::list({group({"b"}, {{"lr", 0.1}, {"odd", "kept"}}),
                                    group({"a", "c"}, {{"lr", 0.2}, {"max_grad_norm", 9.0}})});
  const Value live =
      Value::list({group({"c", "a"}, {{"lr", 1.0}, {"max_grad_norm", 1.0}, {"new", true}}),
                   group({"b"}, {{"lr", 1.0}, {"sharded", true}})});
  const Value fit = fit_groups(stored, live);
  ASSERT_EQ(fit.size(), 2U);
  EXPECT_EQ(fit[0]["params"], Value::list({"c", "a"}));
  EXPECT_EQ(fit[0]["lr"].as_real(), 0.2);
  EXPECT_EQ(fit[0]["max_grad_norm"].as_real(), 1.0);  // the live one's
  EXPECT_TRUE(fit[0]["new"].as_bool());               // the checkpoint does not know it
  EXPECT_EQ(fit[1]["lr"].as_real(), 0.1);
  EXPECT_EQ(fit[1]["odd"].as_string(), "kept");
  EXPECT_TRUE(fit[1]["sharded"].as_bool());
}

TEST(FitGroups, NamesWithWrappersAreTheLiveOnes) {
  const Value stored = Value::list(
      {group({"a", "b"}, {{"param_names", Value::list({"a", "b"})}, {"max_grad_norm_ratio", 2}})});
  const Value own = Value::list({"_fsdp_wrapped_module.b", "_fsdp_wrapped_module.a"});
  const Value fit = fit_groups(
      stored, Value::list({group({"b", "a"}, {{"param_names", own}, {"max_grad_norm_ratio", 3}})}));
  EXPECT_EQ(fit[0]["param_names"], own);
  EXPECT_EQ(fit[0]["max_grad_norm_ratio"].as_int(), 3);
  const Value nameless = fit_groups(stored, Value::list({group({"b", "a"}, {})}));
  EXPECT_EQ(nameless[0]["param_names"], Value::list({"b", "a"}));
}

TEST(FitGroups, OneGroupBecomesTwo) {
  const Value stored = Value::list({group({"a", "b"}, {{"lr", 0.5}, {"weight_decay", 0.1}})});
  const auto live = [](double second) {
    return Value::list(
        {group({"b"}, {{"weight_decay", 0.3}}), group({"a"}, {{"weight_decay", second}})});
  };
  const Value fit = fit_groups(stored, live(0.0));
  EXPECT_EQ(fit[0]["params"], Value::list({"b"}));
  EXPECT_EQ(fit[0]["weight_decay"].as_real(), 0.1);
  EXPECT_EQ(fit[1]["params"], Value::list({"a"}));
  EXPECT_EQ(fit[1]["weight_decay"].as_real(), 0.0);
  EXPECT_EQ(fit[1]["lr"].as_real(), 0.5);
  EXPECT_EQ(code_of([&] { (void)fit_groups(stored, live(0.3)); }), ErrorCode::mismatch);
}

TEST(FitGroups, WhatDoesNotFitIsRefused) {
  const auto code = [](const Value& stored, const Value& live) {
    return code_of([&] { (void)fit_groups(stored, live); });
  };
  const Value one = Value::list({group({"a", "b"}, {})});
  EXPECT_EQ(code(one, Value::list({group({"a"}, {})})), ErrorCode::mismatch);
  EXPECT_EQ(code(one, Value::list({group({"a", "b", "c"}, {})})), ErrorCode::mismatch);
  EXPECT_EQ(code(one, Value::list({group({"a"}, {}), group({"b"}, {}), group({}, {})})),
            ErrorCode::mismatch);
  EXPECT_EQ(code(one, Value::list({group({"a"}, {}), group({"c"}, {{"weight_decay", 0.0}})})),
            ErrorCode::mismatch);
  const Value two = Value::list({group({"a"}, {}), group({"b"}, {})});
  EXPECT_EQ(code(two, one), ErrorCode::mismatch);
  EXPECT_EQ(code(two, Value::list({group({"a"}, {}), group({"a"}, {})})), ErrorCode::mismatch);
  const Value numbers = Value::list({Value::dict({{"params", Value::list({0, 1})}})});
  EXPECT_EQ(code(numbers, one), ErrorCode::mismatch);
}

}  // namespace
}  // namespace tessera
