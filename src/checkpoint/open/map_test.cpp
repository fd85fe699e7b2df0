// Leaves renamed, dropped or computed while they are read, loaded or converted.
#include <numeric>

#include "checkpoint/test_support.h"
#include "tessera/tensor_view.h"

namespace tessera {
namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)

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

}  // namespace
}  // namespace tessera
