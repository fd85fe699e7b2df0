#include "format/torch/script.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "format/test_support.h"
#include "value/render.h"

namespace tessera::torch_file {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Pairs = std::vector<Value::Pair>;

Value script(const std::string& name, Value state, const std::string& file = "__torch__") {
  return Value::object({.callable = Value::global(file, name),
                        .arguments = Value::tuple(),
                        .by_new = true,
                        .state = std::move(state)});
}

Value module(Pairs attributes) {
  return script("Module", Value::dict(std::move(attributes)));
}

Value tensor() {
  Tensor made;
  made.shape = {2};
  made.parameter = made.requires_grad = true;
  return Value(std::move(made));
}

Script made_of(const Value& data, const std::string& code = "",
               const Value& constants = Value::tuple()) {
  return script_of(data, constants, [&](const std::string&) { return code; });
}

std::vector<std::string> keys_in(const Value& dict) {
  std::vector<std::string> names;
  for (const auto& [key, value] : dict.pairs()) names.push_back(key.as_string());
  return names;
}

TEST(Script, AModuleIsItsParametersAndBuffersByName) {
  const Value shared = module({{"w", tensor()}});
  const Script made = made_of(module({{"b", tensor()},
                                      {"training", true},
                                      {"none", Value()},
                                      {"x", shared},
                                      {"y", module({{"z", shared}})}}));
  EXPECT_THAT(keys_in(made.tree), ElementsAre("b", "x.w", "y.z.w"));
  EXPECT_THAT(made.notes, IsEmpty());
  EXPECT_EQ(made.tree.dict_kind(), DictKind::dict);
  EXPECT_FALSE(made.tree.at("b").as_tensor().requires_grad);
  EXPECT_FALSE(made.tree.at("b").as_tensor().parameter);
}

// What only has the name of what every module has.
TEST(Script, AModuleOrTensorMayBeCalledTraining) {
  const Script made = made_of(
      module({{"training", module({{"w", tensor()}})}, {"_is_full_backward_hook", tensor()}}));
  EXPECT_THAT(keys_in(made.tree), ElementsAre("training.w", "_is_full_backward_hook"));
}

// Files of 16 MiB each, and more classes than could be looked for in them one by one.
TEST(Script, MuchCodeIsALimitAndManyClassesTakeNoTime) {
  const std::string much(16 << 20, '\n');
  Pairs modules;
  for (int i = 0; i < 5; ++i)
    modules.emplace_back("m" + std::to_string(i), script("M", Value::dict({{"w", tensor()}}),
                                                         "__torch__.f" + std::to_string(i)));
  const Value data = module(modules);
  EXPECT_EQ(test::thrown([&] { (void)made_of(data, much); }), std::pair(ErrorCode::limit, true));
  modules.clear();
  for (int i = 0; i < 10'000; ++i) {
    const std::string name = "M" + std::to_string(i);
    modules.emplace_back(name, script(name, Value::dict({{"w", tensor()}})));
  }
  EXPECT_EQ(made_of(module(modules), much).tree.size(), 10'000U);
}

TEST(Script, TheListsOfAClassTellWhatElseThereIs) {
  const std::string code =
      "class Other(Module):\n  __parameters__ = [\"q\", ]\n  __buffers__ = []\n"
      "class Module(Module):\n  __parameters__ = [\"w\", ]\n  __buffers__ = [\"b\", ]\n";
  const Value data = module({{"w", tensor()}, {"b", tensor()}, {"q", tensor()}, {"rate", 0.5}});
  const Script made = made_of(data, code, Value::tuple({tensor()}));
  EXPECT_THAT(keys_in(made.tree), ElementsAre("w", "b", "q", "rate", "CONSTANTS.c0"));
  ASSERT_EQ(made.notes.size(), 1U);
  EXPECT_THAT(made.notes[0], HasSubstr("q, rate, CONSTANTS.c0"));
  // Lists that are cut or missing say nothing.
  for (const char* cut : {"class Module(Module):\n  __parameters__ = [\"w\"", "class Module(",
                          "class Module(Module):\n  __parameters__ = []\n", "\nclass Modul(\n",
                          "class Module(Module):\n  __parameters__ = [\"w, ]\n  __buffers__ = []"})
    EXPECT_THAT(made_of(module({{"q", tensor()}}), cut).notes, IsEmpty()) << cut;
}

TEST(Script, ModulesThatCannotBeAreErrors) {
  const auto code_of = [](const Value& data) { return test::thrown([&] { (void)made_of(data); }); };
  Value inner = module({});
  Value outer = module({{"inner", inner}});
  inner.as_object().state->set_item("outer", outer);
  EXPECT_EQ(code_of(outer), std::pair(ErrorCode::corrupt, true));
  inner.as_object().state->erase("outer");  // or the two keep one another
  EXPECT_EQ(code_of(module({{"a.b", tensor()}, {"a", module({{"b", tensor()}})}})),
            std::pair(ErrorCode::conflict, true));
  Value deep = module({{"w", tensor()}});
  for (int level = 0; level < 1500; ++level) deep = module({{"m", deep}});
  EXPECT_EQ(code_of(deep), std::pair(ErrorCode::limit, true));
  // Twice as many places at each level.
  Value wide = module({{"w", tensor()}});
  for (int level = 0; level < 40; ++level) wide = module({{"a", wide}, {"b", wide}});
  EXPECT_EQ(code_of(wide), std::pair(ErrorCode::limit, true));
}

// A state that only the class's code can take, a name that is none, other classes: as pickled.
TEST(Script, WhatIsNoModuleStaysAsItIs) {
  const Value odd[] = {script("Quantized", Value::tuple({tensor()})),
                       script("Numbers", Value::dict({{1, tensor()}})),
                       script("Theirs", Value::dict({{"w", tensor()}}), "torch.nn")};
  for (const Value& value : odd) {
    EXPECT_EQ(made_of(value).tree.identity(), value.identity());
    const Script inside = made_of(module({{"m", value}}));
    EXPECT_THAT(keys_in(inside.tree), ElementsAre("m"));
    EXPECT_EQ(inside.notes.size(), 1U);
  }
}

Value optimizer(Pairs states, Pairs group) {
  return module({{"pytorch_version", "1.5.0"},
                 {"state", module(std::move(states))},
                 {"param_groups", module({{"param_groups/size", tensor()},
                                          {"param_groups/0", module(std::move(group))}})}});
}

TEST(Script, AnOptimizerHasNumbers) {
  const Value options = module({{"lr", 0.5}});
  const Pairs group{
      {"params/size", tensor()}, {"params/0", "77"}, {"params/1", "12"}, {"options", options}};
  const Value state = made_of(optimizer({{"12", module({{"step", 3}})}}, group)).tree;
  EXPECT_EQ(render(state),
            "{'state': {1: {'step': 3}}, 'param_groups': [{'params': [0, 1], 'lr': 0.5}]}");
  // State of a parameter that is in no group.
  const Value lost = made_of(optimizer({{"9", module({{"step", 3}})}}, group)).tree;
  EXPECT_THAT(keys_in(lost), ::testing::Contains("state.9.step"));
}

// As torch.optim.SGD([{"params": [w, v, w]}, {"params": [x, w]}]).state_dict() counts.
TEST(Script, AParameterThatComesAgainHasOneNumber) {
  const auto group_of = [](Pairs parameters) { return module(std::move(parameters)); };
  const Value first = group_of({{"params/0", "77"}, {"params/1", "12"}, {"params/2", "77"}});
  const Value second = group_of({{"params/0", "3"}, {"params/1", "77"}});
  const Value data =
      module({{"pytorch_version", "1.5.0"},
              {"state", module({{"77", module({{"step", 6}})}, {"12", module({{"step", 3}})}})},
              {"param_groups", module({{"param_groups/0", first}, {"param_groups/1", second}})}});
  EXPECT_EQ(render(made_of(data).tree),
            "{'state': {1: {'step': 3}, 2: {'step': 6}}, "
            "'param_groups': [{'params': [2, 1, 2]}, {'params': [3, 2]}]}");
}

TEST(Script, TypesBesideValuesAreDropped) {
  Value result;
  const auto pickled = [](const char* name) { return Value::global("torch.jit._pickle", name); };
  EXPECT_TRUE(restore_typed(pickled("restore_type_tag"), Value::tuple({7, "int"}), result));
  EXPECT_EQ(result.as_int(), 7);
  EXPECT_TRUE(restore_typed(pickled("build_intlist"), Value::tuple({Value::list({1})}), result));
  EXPECT_TRUE(result.is(Value::Kind::list));
  for (const auto& [name, arguments] : {std::pair("restore_type_tag", Value::tuple({7})),
                                        std::pair("build_intlist", Value::tuple({7})),
                                        std::pair("build_intlist", Value::list({Value::list()})),
                                        std::pair("build_tensor_from_id", Value::tuple({1}))})
    EXPECT_FALSE(restore_typed(pickled(name), arguments, result)) << name;
}

constexpr const char* kArchives[] = {"net", "opt", "tensor", "vec", "scripted", "traced"};

TEST(Script, ArchivesOfLibtorchAreRead) {
  for (const char* name : kArchives) {
    const auto bytes = test::golden(std::string("libtorch/") + name + ".pt");
    EXPECT_TRUE(read_script(test::source(bytes)).has_value()) << name;
    EXPECT_EQ(test::thrown([&] { (void)read(test::source(bytes)); }),
              std::pair(ErrorCode::unsupported, true));
  }
  EXPECT_FALSE(read_script(test::source(test::golden("libtorch/pick.pt"))).has_value());
  EXPECT_EQ(keys_in(read(test::source(test::golden("libtorch/pick.pt")))),
            std::vector<std::string>{"a"});
}

// Each byte, by each of two bits.
TEST(Script, ADamagedArchiveIsAnErrorOrReadAsItWas) {
  for (const char* name : kArchives) {
    const auto whole = test::golden(std::string("libtorch/") + name + ".pt");
    const std::string as_it_was = render(read_script(test::source(whole))->tree, 1 << 20);
    for (std::size_t at = 0; at < whole.size(); ++at) {
      auto bytes = whole;
      bytes[at] ^= at % 2 == 0 ? std::byte{1} : std::byte{32};
      try {
        const auto made = read_script(test::source(bytes));
        if (!made) continue;
        EXPECT_EQ(render(made->tree, 1 << 20), as_it_was) << name << " " << at;
      } catch (const Error&) {
        continue;
      }
    }
  }
}

}  // namespace
}  // namespace tessera::torch_file
