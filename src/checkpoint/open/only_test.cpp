// A part of a checkpoint into a new tree (P-06).
#include "checkpoint/test_support.h"

namespace tessera {
namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)
using Names = std::vector<std::string>;

Value numbered(float first) {
  return Value(counting({2}, whole({2}), first));
}

class Only : public testing::TestWithParam<const char*> {
 protected:
  Only() {
    Value layers = Value::list();
    for (const float first : {0.0F, 10.0F, 20.0F, 30.0F})
      layers.items().push_back(Value::dict({{"w", numbered(first)}, {"b", numbered(first + 5)}}));
    save(Value::dict({{"model", Value::dict({{"layers", layers}, {"head", numbered(50)}})},
                      {"modelling", 1},
                      {"optim", Value::dict({{"lr", 0.5}, {"steps", Value::list({1, 2, 3})}})}}),
         path_);
  }

  // The names in the tree of a part, and the part itself.
  [[nodiscard]] Names names_of(const Names& keys) const {
    const Value tree = Checkpoint::open(path_).only(keys).load();
    Names names;
    for (const Leaf& leaf : flatten(tree)) names.push_back(leaf.name);
    std::ranges::sort(names);
    return names;
  }
  [[nodiscard]] Error refusal_of(const Names& keys) const {
    return error_of([&] { (void)Checkpoint::open(path_).only(keys); });
  }

  std::string path_ = temporary_directory() + GetParam();
};

TEST_P(Only, TakesNamesBeginningsAndGlobs) {
  EXPECT_EQ(names_of({"model.head"}), Names{"model.head"});
  EXPECT_EQ(names_of({"optim", "model.head"}), (Names{"model.head", "optim.lr", "optim.steps"}));
  EXPECT_EQ(names_of({"model"}).size(), 9U);  // and not "modelling"
  EXPECT_EQ(names_of({"*.b"}), (Names{"model.layers.0.b", "model.layers.1.b", "model.layers.2.b",
                                      "model.layers.3.b"}));
  EXPECT_EQ(names_of({"model*ing", "model.head", "model.head"}),
            (Names{"model.head", "modelling"}));
}

TEST_P(Only, TheResultOwnsItsMemoryAndHasNothingElse) {
  const Value tree = Checkpoint::open(path_).only({"model.layers"}).load();
  ASSERT_EQ(tree.size(), 1U);
  ASSERT_EQ(tree["model"].size(), 1U);
  const Value layers = tree["model"]["layers"];
  ASSERT_EQ(layers.size(), 4U);
  EXPECT_EQ(floats(layers[3]["b"].as_tensor()), (std::vector<float>{35, 36}));
}

// PyTorch fails here: it leaves None in the list.
TEST_P(Only, ElementsOfAListKeepTheirPlaces) {
  EXPECT_EQ(names_of({"model.layers.2.w", "model.layers.1"}),
            (Names{"model.layers.1.b", "model.layers.1.w", "model.layers.2.w"}));
  const Checkpoint part = Checkpoint::open(path_).only({"model.layers.2.w"});
  const Value layers = part.load()["model"]["layers"];
  ASSERT_EQ(layers.size(), 3U);
  EXPECT_EQ(layers[0], Value::dict());
  EXPECT_EQ(layers[1], Value::dict());
  EXPECT_EQ(floats(layers[2]["w"].as_tensor()), (std::vector<float>{20, 21}));
  EXPECT_EQ(floats(Checkpoint::open(path_)
                       .only({"model.layers.2.w"})
                       .load()["model"]["layers"][2]["w"]
                       .as_tensor()),
            (std::vector<float>{20, 21}));
}

TEST_P(Only, APartIsReadLoadedAndConvertedLikeAnyOther) {
  const Checkpoint part = Checkpoint::open(path_).only({"model.layers.2", "optim.lr"});
  EXPECT_EQ(part.names(), (Names{"model.layers.2.b", "model.layers.2.w"}));
  EXPECT_EQ(part.find("model.head"), nullptr);
  Value tree = part.load();
  Tensor& weight = tree["model"]["layers"][2]["w"].as_tensor();
  std::memset(weight.pieces[0].storage->data, 0, 8);
  LoadOptions options;
  options.extra = OnDifference::refuse;
  load(tree, part, options, *solo_group());
  EXPECT_EQ(floats(weight), (std::vector<float>{20, 21}));
  ConvertOptions how;
  how.to = CheckpointKind::dcp;
  convert(part, path_ + "-part", how);
  EXPECT_TRUE(diff(Checkpoint::open(path_ + "-part"), part).empty());
}

TEST_P(Only, AnUnknownKeyNamesOneThatIsNear) {
  const auto expect = [&](const std::string& key, const std::string& other) {
    const Error error = refusal_of({"model.head", key});
    EXPECT_EQ(error.code(), ErrorCode::not_found);
    EXPECT_EQ(error.key(), key);
    EXPECT_EQ(error.path(), path_);
    const std::string end = ", did you mean '" + other + "'?";
    EXPECT_EQ(error.message().ends_with(end), !other.empty()) << error.message();
    EXPECT_EQ(error.message().find("did you") == std::string::npos, other.empty());
  };
  expect("model.haed", "model.head");
  expect("model.layer", "model.layers");
  expect("model.", "model");
  expect("layers.3", "model.layers.3");
  expect("something.else", "");
  expect("*.nothing", "");
}

TEST_P(Only, NoKeysGiveAnEmptyTree) {
  const Value tree = Checkpoint::open(path_).only({}).load();
  EXPECT_TRUE(tree.is(Value::Kind::dict));
  EXPECT_EQ(tree.size(), 0U);
}

INSTANTIATE_TEST_SUITE_P(Kinds, Only, testing::Values("/c", "/c.pt", "/c.safetensors"));

// 100,000 keys against as many leaves: each is looked up, not compared with all.
TEST(OnlyMany, KeysOfALargeCheckpoint) {
  Checkpoint checkpoint;
  Names keys;
  for (int i = 0; i < 100'000; ++i) {
    keys.push_back("model.layers." + std::to_string(i) + ".weight");
    checkpoint.leaves.push_back({keys.back(), {keys.back()}, i});
  }
  EXPECT_EQ(checkpoint.only(keys).leaves.size(), 100'000U);
}

}  // namespace
}  // namespace tessera
