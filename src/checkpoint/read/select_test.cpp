#include "checkpoint/read/select.h"

#include <cmath>

#include "checkpoint/read/cast.h"
#include "checkpoint/test_support.h"
#include "value/render.h"

namespace tessera {

// Selection, renaming and conversion of types on the way into a target.

namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)

Leaf leaf(const Path& path) {
  return {dotted(path), path, Value(1)};
}

std::vector<std::string> names(const std::vector<Leaf>& leaves) {
  std::vector<std::string> names;
  for (const Leaf& leaf : leaves) names.push_back(leaf.name);
  return names;
}

TEST(Select, PartsOfATrainingState) {
  const std::vector<Leaf> leaves = {leaf({"app", "model", "w"}),
                                    leaf({"app", "optim", "state", "w", "exp_avg"}),
                                    leaf({"app", "step"})};
  const auto chosen = [&](const std::vector<std::string>& only) {
    return names(select(leaves, only, "c").leaves);
  };
  EXPECT_EQ(chosen({}).size(), 3U);
  EXPECT_EQ(chosen({"model"}), std::vector<std::string>{"app.model.w"});
  EXPECT_EQ(chosen({"optim"}), std::vector<std::string>{"app.optim.state.w.exp_avg"});
  EXPECT_EQ(chosen({"model", "*.step"}), (std::vector<std::string>{"app.model.w", "app.step"}));
  EXPECT_EQ(chosen({"app.optim"}), std::vector<std::string>{"app.optim.state.w.exp_avg"});
  EXPECT_EQ(chosen({"app.step", "app.model.w"}).size(), 2U);
  EXPECT_EQ(chosen({"app"}).size(), 3U);
  for (const char* no_beginning : {"ap", "app.", "app.mod", ".app", ""})
    EXPECT_EQ(code_of([&] { (void)chosen({no_beginning}); }), ErrorCode::not_found);
  EXPECT_EQ(code_of([&] { (void)chosen({"none*"}); }), ErrorCode::not_found);
  // A slip in one of several was passed over.
  try {
    (void)chosen({"app.step", "app.modle"});
    FAIL() << "not refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.key(), "app.modle");
    EXPECT_STREQ(error.what(),
                 "not_found: the checkpoint has no such key and none that begins with it, did you "
                 "mean 'app.model'? [c, key 'app.modle']");
  }
  // A file that is a model.
  const Selection file = select({leaf({"h.0.w"}), leaf({"h.0.w.exp_avg"})}, {"model"}, "c");
  EXPECT_EQ(names(file.leaves), std::vector<std::string>{"h.0.w"});
  EXPECT_TRUE(file.notes.empty());
}

TEST(Select, TheNameOfAModelIsNoModel) {
  const std::vector<Leaf> leaves = {leaf({"net", "w"}), leaf({"args", "model"})};
  EXPECT_EQ(select(leaves, {"model"}, "c").leaves.size(), 2U);  // all but the optimizer's
}

TEST(Select, SaysThatAModelOfAFileIsMoreThanItsNamesSay) {
  const std::vector<Leaf> leaves = {leaf({"model.w"}), leaf({"lm_head"}), leaf({"bias"})};
  const Selection all = select(leaves, {"model"}, "c");
  EXPECT_EQ(all.leaves.size(), 3U);
  ASSERT_EQ(all.notes.size(), 1U);
  EXPECT_NE(all.notes[0].find("2 names that do not begin with 'model.'"), std::string::npos)
      << all.notes[0];
  EXPECT_TRUE(select(leaves, {"model.*"}, "c").notes.empty());
}

TEST(Select, WhatIsPrintedSelects) {
  const std::vector<std::string> all = {"['a']['b']", "a\\nb", "a\nb", "[ab]",
                                        "a",          "\\x41", "A",    "w\x9b"};
  std::vector<Leaf> leaves;
  for (const std::string& name : all) leaves.push_back(leaf({name}));
  for (const std::string& name : all) {
    EXPECT_EQ(names(select(leaves, {printable_name(name)}, "c").leaves),
              std::vector<std::string>{name});
  }
}

TEST(Rename, RulesApplyInOrderAndKeepTheTree) {
  std::vector<Leaf> leaves = {leaf({"model", "net1.weight"}),
                              leaf({"optim", "state", "net1.weight", "exp_avg"}),
                              leaf({"groups", std::int64_t{0}, "lr"})};
  rename(leaves, {"net(\\d)=>block.$1", "block\\.=>b."});
  EXPECT_EQ(names(leaves),
            (std::vector<std::string>{"model.b.1.weight", "optim.state.b.1.weight.exp_avg",
                                      "groups.0.lr"}));
  EXPECT_EQ(leaves[0].path, (Path{"model", "b.1.weight"}));
  EXPECT_EQ(leaves[1].path, (Path{"optim", "state", "b.1.weight", "exp_avg"}));
  EXPECT_EQ(leaves[2].path, (Path{"groups", std::int64_t{0}, "lr"}));
  rename(leaves, {"^model\\.=>"});
  EXPECT_EQ(leaves[0].path, (Path{"b.1.weight"}));
}

TEST(Rename, TwoThatBecomeOneAreAConflict) {
  std::vector<Leaf> leaves = {leaf({"a", "w"}), leaf({"b", "w"})};
  EXPECT_EQ(code_of([&] { rename(leaves, {"^[ab]=>c"}); }), ErrorCode::conflict);
  EXPECT_EQ(code_of([&] { rename(leaves, {".*=>"}); }), ErrorCode::conflict);
  for (const char* bad : {"a", "=>b", "(=>b"})
    EXPECT_EQ(code_of([&] { rename(leaves, {bad}); }), ErrorCode::invalid_argument) << bad;
}

// Two ranks' float rows and a vector of integers.
std::string saved() {
  const std::string directory = temporary_directory() + "/c";
  run_ranks(2, [&](Group& group) {
    const Shape shape = {600, 1001};
    Tensor steps = counting({4}, whole({4}), 0);
    steps.dtype = DType::int32;
    steps.sharded = false;
    save(Value::dict({{Value("w"), Value(counting(shape, chunk(shape, group.rank(), 2), 0.37F))},
                      {Value("steps"), Value(std::move(steps))}}),
         directory, group);
  });
  return directory;
}

TEST(ConvertOptions, FloatingTensorsAreRoundedIntoEveryKind) {
  const std::string source = saved();
  const std::string root = temporary_directory();
  const Value original = Checkpoint::open(source).load();
  for (const auto& [name, kind] : std::vector<std::pair<std::string, CheckpointKind>>{
           {"a.safetensors", CheckpointKind::safetensors},
           {"a.pt", CheckpointKind::torch_file},
           {"dcp", CheckpointKind::dcp}}) {
    ConvertOptions options;
    options.to = kind;
    options.dtype = DType::bfloat16;
    options.rename = {"^w$=>model.w"};
    const std::string target = (root + "/").append(name);
    convert(source, target, options);
    EXPECT_TRUE(verify(target).findings.empty()) << name;
    const Checkpoint result = Checkpoint::open(target);
    const Tensor& tensor = result.find("model.w")->value.as_tensor();
    EXPECT_EQ(tensor.dtype, DType::bfloat16);
    EXPECT_EQ(result.find("steps")->value.as_tensor().dtype, DType::int32);
    const std::vector<Leaf> loaded = flatten(result.load());
    const auto w = std::find_if(loaded.begin(), loaded.end(),
                                [](const Leaf& leaf) { return leaf.name == "model.w"; });
    const Storage& bytes = *w->value.as_tensor().pieces.at(0).storage;
    const std::vector<float> exact = floats(original.at("w").as_tensor());
    std::vector<std::byte> expected(exact.size() * 2);
    cast(DType::float32, reinterpret_cast<const std::byte*>(exact.data()), DType::bfloat16,
         expected.data(), static_cast<std::int64_t>(exact.size()));
    EXPECT_TRUE(std::equal(expected.begin(), expected.end(), bytes.data, bytes.data + bytes.size))
        << name;
  }
}

TEST(ConvertOptions, ATorchFileKeepsItsTreeUnderARename) {
  const std::string root = temporary_directory();
  ConvertOptions options;
  options.to = CheckpointKind::torch_file;
  convert(saved(), root + "/a.pt", options);
  options.rename = {"w=>v"};
  convert(root + "/a.pt", root + "/b.pt", options);
  EXPECT_EQ(names(Checkpoint::open(root + "/b.pt").leaves),
            (std::vector<std::string>{"v", "steps"}));
}

}  // namespace
}  // namespace tessera
