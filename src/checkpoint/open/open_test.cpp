#include "checkpoint/open/open.h"

#include <numeric>

#include "checkpoint/test_support.h"
#include "tessera/tensor_view.h"

namespace tessera {

// A part of a checkpoint into a new tree (P-06).

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

// Leaves renamed, dropped or computed while they are read, loaded or converted.

namespace {

const Shape kShape{4, 5};

Checkpoint source_in(const std::string& root) {
  const Value model = Value::dict({{"w", counting(kShape, whole(kShape), 0)},
                                   {"dropped", counting(kShape, whole(kShape), 50)}});
  save(Value::dict({{"model", model}, {"step", 7}}), root + "/source");
  return Checkpoint::open(root + "/source");
}

// "model.w" doubled, under another name.
Checkpoint doubled(const Checkpoint& source) {
  return source.map([&source](Leaf leaf) -> std::optional<Leaf> {
    if (leaf.name == "model.dropped") return std::nullopt;
    if (leaf.name != "model.w") return leaf;
    leaf.name = "model.twice";
    leaf.value = computed_tensor(
        DType::float32, kShape, [&source](const FlatRange& range, MutableByteView out) {
          const auto count = range.end - range.begin;
          ASSERT_EQ(out.size(), static_cast<std::size_t>(count) * 4);
          source.read("model.w", range, TensorView::of(out, DType::float32, {count}));
          auto* numbers = reinterpret_cast<float*>(out.data());
          for (std::int64_t i = 0; i < count; ++i) numbers[i] *= 2;
        });
    return leaf;
  });
}

TEST(Map, ReadsLoadsAndConvertsWhatItsFunctionGives) {
  const std::string root = temporary_directory();
  const Checkpoint source = source_in(root);
  const Checkpoint mapped = doubled(source);
  EXPECT_EQ(mapped.names(), std::vector<std::string>{"model.twice"});
  std::vector<double> row(5);
  mapped.read("model.twice", Box{{2, 0}, {1, 5}},
              TensorView::of(row.data(), DType::float64, {1, 5}));
  EXPECT_EQ(row, (std::vector<double>{20, 22, 24, 26, 28}));
  const Value tree = mapped.load();
  EXPECT_EQ(tree["step"].as_int(), 7);
  EXPECT_EQ(floats(tree["model"]["twice"].as_tensor())[19], 38);
  EXPECT_EQ(tree["model"].size(), 1U);
  for (const auto& [name, kind] : {std::pair("/a.pt", CheckpointKind::torch_file),
                                   {"/a.safetensors", CheckpointKind::safetensors},
                                   {"/a", CheckpointKind::dcp}}) {
    ConvertOptions how;
    how.to = kind;
    convert(mapped, root + name, how);
    const Checkpoint made = Checkpoint::open(root + name);
    EXPECT_TRUE(diff(made, mapped).empty()) << name;
    EXPECT_EQ(floats(made.load()["model"]["twice"].as_tensor())[19], 38);
  }
  EXPECT_EQ(source.names().size(), 2U);  // as it was
}

TEST(Map, BytesInsideOfAnElementAreServed) {
  const Tensor tensor =
      computed_tensor(DType::int32, {3}, [](const FlatRange& range, MutableByteView out) {
        std::iota(reinterpret_cast<std::int32_t*>(out.data()),
                  reinterpret_cast<std::int32_t*>(out.data() + out.size()),
                  static_cast<std::int32_t>(range.begin));
      });
  std::vector<std::byte> bytes(6);
  tensor.pieces.at(0).storage->source->read_at(3, bytes);
  EXPECT_EQ(bytes, (std::vector<std::byte>{std::byte{0}, std::byte{1}, std::byte{0}, std::byte{0},
                                           std::byte{0}, std::byte{2}}));
}

TEST(Map, NamesStayUnique) {
  const std::string root = temporary_directory();
  const Checkpoint source = source_in(root);
  const auto named = [&source](const std::string& name) {
    return code_of([&] {
      (void)source.map([&name](Leaf leaf) {
        leaf.name = name;
        return std::optional(std::move(leaf));
      });
    });
  };
  EXPECT_EQ(named("same"), ErrorCode::conflict);
  EXPECT_EQ(named(""), ErrorCode::conflict);
  ConvertOptions how;
  how.resume = true;
  EXPECT_EQ(code_of([&] { convert(doubled(source), root + "/b", how); }), ErrorCode::unsupported);
}

// In a cache of the Hub all files are links to blobs, whose names say nothing of an index.
TEST(Open, AnIndexThatIsALinkToABlobIsOfItsDirectory) {
  namespace fs = std::filesystem;
  const std::string model = temporary_directory() + "/models--o--m";
  const std::string snapshot = model + "/snapshots/c0ffee";
  fs::create_directories(model + "/blobs");
  fs::create_directories(snapshot);
  save(Value::dict({{"a", numbered(1)}}), model + "/blobs/w.safetensors");
  fs::rename(model + "/blobs/w.safetensors", model + "/blobs/123");
  write_text(model + "/blobs/456", R"({"metadata": {}, "weight_map": {"a": "A.safetensors"}})");
  fs::create_symlink("../../blobs/123", snapshot + "/A.safetensors");
  const std::string index = snapshot + "/model.safetensors.index.json";
  fs::create_symlink("../../blobs/456", index);
  EXPECT_EQ(Checkpoint::open(index).names(), Names{"a"});
  EXPECT_EQ(Checkpoint::open(index).path, snapshot);
  // Also by a link from elsewhere, which means what it leads to.
  const std::string link = temporary_directory() + "/m.safetensors.index.json";
  fs::create_symlink(index, link);
  EXPECT_EQ(Checkpoint::open(link).names(), Names{"a"});
}

}  // namespace
}  // namespace tessera
