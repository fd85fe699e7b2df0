#include "format/torch/modules.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "format/test_support.h"

namespace tessera::torch_file {
namespace {

using Pairs = std::vector<Value::Pair>;

Value object(const std::string& module, const std::string& name, Value state) {
  return Value::object({.callable = Value::global(module, name),
                        .arguments = Value::tuple(),
                        .by_new = true,
                        .state = std::move(state)});
}

Value module_of(Pairs parameters, Pairs modules = {}, Pairs buffers = {}) {
  return object("torch.nn.modules.linear", "Linear",
                Value::dict({{"_parameters", Value::dict(std::move(parameters))},
                             {"_buffers", Value::dict(std::move(buffers))},
                             {"_modules", Value::dict(std::move(modules))}}));
}

std::vector<std::string> names_in(const Value& state) {
  std::vector<std::string> names;
  for (const auto& [key, value] : state.pairs()) names.push_back(key.as_string());
  return names;
}

// tests/parity/test_modules.py compares with PyTorch. Buffers of modules from before there was a
// set of those that do not persist are all in the state.
TEST(TorchModules, OldOnesHaveNoSetOfBuffers) {
  Value tree = module_of({{"w", Value(Tensor{})}}, {}, {{"b", Value(Tensor{})}});
  EXPECT_EQ(replace_modules(tree).size(), 1U);
  EXPECT_EQ(names_in(tree), (std::vector<std::string>{"w", "b"}));
  EXPECT_EQ(tree.dict_kind(), DictKind::ordered_dict);
}

TEST(TorchModules, WhatOnlyLooksLikeOneStays) {
  const Value odd = Value::dict({{Value(3), Value(Tensor{})}});
  for (const Value& state :
       {Value(), Value(5), Value::tuple(), Value::tuple({Value(), Value::dict()}),
        Value::dict({{"_parameters", Value::dict()}, {"_buffers", Value::dict()}}),
        Value::dict({{"_parameters", Value::list()},
                     {"_buffers", Value::dict()},
                     {"_modules", Value::dict()}}),
        Value::dict(
            {{"_parameters", odd}, {"_buffers", Value::dict()}, {"_modules", Value::dict()}})}) {
    Value tree = Value::dict({{"a", object("a", "B", state)}});
    const void* const before = tree.at("a").identity();
    EXPECT_TRUE(replace_modules(tree).empty());
    EXPECT_EQ(tree.at("a").identity(), before);
  }
}

// All of a module or nothing: half a state dict would be loaded without a word.
TEST(TorchModules, OneWithAnUnknownPartIsLeft) {
  for (const Value& part : {Value(5), object("a", "B", Value()),
                            object("torch.ao.nn.quantized.modules.linear", "Linear",
                                   module_of({}).as_object().state.value())}) {
    Value tree = module_of({{"w", Value(Tensor{})}}, {{"x", part}});
    const void* const before = tree.identity();
    const std::vector<std::string> lines = replace_modules(tree);
    EXPECT_THAT(lines, testing::ElementsAre(testing::HasSubstr("left as it was pickled")));
    EXPECT_EQ(tree.identity(), before);
  }
}

TEST(TorchModules, P23SharedOnesDoNotExplode) {
  Value module = module_of({{"w", Value(Tensor{})}});
  for (int i = 0; i < 40; ++i) module = module_of({}, {{"a", module}, {"b", module}});
  EXPECT_EQ(test::thrown([&] { (void)replace_modules(module); }).first, ErrorCode::limit);
  Value deep = module_of({{"w", Value(Tensor{})}});
  for (int i = 0; i < 900; ++i) deep = module_of({}, {{std::string(300'000, 'x'), deep}});
  EXPECT_EQ(test::thrown([&] { (void)replace_modules(deep); }).first, ErrorCode::limit);
  Value shared = module_of({{"w", Value(Tensor{})}});
  Value::List many(100'000, shared);
  Value list = Value::list(many);
  EXPECT_EQ(replace_modules(list).size(), 1U);
  EXPECT_EQ(list.items().front().identity(), list.items().back().identity());
}

}  // namespace
}  // namespace tessera::torch_file
