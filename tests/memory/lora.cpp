// LoRA adapters merged into a model as it is converted: W + scale * B * A, in 8 MB whatever the
// model's size.
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

#include "conformance/temporary_directory.h"
#include "heap.h"
#include "tessera/checkpoint.h"
#include "tessera/convert.h"
#include "tessera/tensor_view.h"

namespace tessera {
namespace {

constexpr std::int64_t kRows = 2048;
constexpr std::int64_t kColumns = 1024;
constexpr std::int64_t kRank = 4;
constexpr int kLayers = 4;  // 32 MiB of weights
constexpr float kScale = 0.5F;

std::string layer(int number) {
  return "layers." + std::to_string(number) + ".weight";
}

std::vector<float> matrix(std::int64_t elements, int modulus) {
  std::vector<float> numbers(static_cast<std::size_t>(elements));
  for (std::size_t i = 0; i < numbers.size(); ++i)
    numbers[i] = static_cast<float>(i % static_cast<std::size_t>(modulus));
  return numbers;
}

std::vector<float> all_of(const Checkpoint& checkpoint, const std::string& name) {
  const Shape& shape = checkpoint.tensor(name).shape;
  std::vector<float> numbers(static_cast<std::size_t>(numel(shape)));
  checkpoint.read(name, TensorView::of(numbers.data(), DType::float32, shape));
  return numbers;
}

// The weight `name` of `base` with the adapter that belongs to it, whose two small matrices are
// read here, once.
Tensor merged(const Checkpoint& base, const Checkpoint& adapter, const std::string& name) {
  const auto elements = [&base, name, a = all_of(adapter, name + ".lora_A"),
                         b = all_of(adapter, name + ".lora_B")](const FlatRange& range,
                                                                MutableByteView out) {
    const std::int64_t count = range.end - range.begin;
    base.read(name, range, TensorView::of(out, DType::float32, {count}));
    auto* weights = reinterpret_cast<float*>(out.data());
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t row = (range.begin + i) / kColumns;
      const std::int64_t column = (range.begin + i) % kColumns;
      float sum = 0;
      for (std::int64_t k = 0; k < kRank; ++k) {
        sum += b[static_cast<std::size_t>(row * kRank + k)] *
               a[static_cast<std::size_t>(k * kColumns + column)];
      }
      weights[i] += kScale * sum;
    }
  };
  return computed_tensor(DType::float32, base.tensor(name).shape, elements);
}

void save_model_and_adapter(const std::string& root) {
  const std::vector<float> w = matrix(kRows * kColumns, 1013);
  const std::vector<float> a = matrix(kRank * kColumns, 7);
  const std::vector<float> b = matrix(kRows * kRank, 5);
  Value model = Value::dict();
  Value adapter = Value::dict();
  for (int i = 0; i < kLayers; ++i) {
    model[layer(i)] = ConstTensorView::of(w.data(), DType::float32, {kRows, kColumns}).tensor();
    adapter[layer(i) + ".lora_A"] =
        ConstTensorView::of(a.data(), DType::float32, {kRank, kColumns}).tensor();
    adapter[layer(i) + ".lora_B"] =
        ConstTensorView::of(b.data(), DType::float32, {kRows, kRank}).tensor();
  }
  save(model, root + "/model.safetensors");
  save(adapter, root + "/adapter.pt");
}

TEST(Lora, IsMergedInEightMegabytes) {
  const TemporaryDirectory directory;
  const std::string& root = directory.path();
  save_model_and_adapter(root);
  const std::int64_t height = heap_height_of([&root] {
    const Checkpoint base = Checkpoint::open(root + "/model.safetensors");
    const Checkpoint adapter = Checkpoint::open(root + "/adapter.pt");
    const Checkpoint model = base.map([&](Leaf leaf) {
      if (adapter.find(leaf.name + ".lora_A") != nullptr)
        leaf.value = merged(base, adapter, leaf.name);
      leaf.name = "model." + leaf.name;
      return std::optional(std::move(leaf));
    });
    ConvertOptions how;
    how.memory = 4 << 20;
    convert(model, root + "/merged.safetensors", how);
  });
  EXPECT_LE(height, 8'000'000);
  const Checkpoint made = Checkpoint::open(root + "/merged.safetensors");
  ASSERT_EQ(made.names().size(), static_cast<std::size_t>(kLayers));
  for (int i = 0; i < kLayers; ++i) {
    const std::vector<float> found = all_of(made, "model." + layer(i));
    for (const std::int64_t at :
         {std::int64_t{0}, kColumns + 3, 1'000'000L, kRows * kColumns - 1}) {
      float sum = 0;
      for (std::int64_t k = 0; k < kRank; ++k) {
        sum += static_cast<float>((at / kColumns * kRank + k) % 5) *
               static_cast<float>((k * kColumns + at % kColumns) % 7);
      }
      EXPECT_EQ(found[static_cast<std::size_t>(at)], static_cast<float>(at % 1013) + kScale * sum);
    }
  }
}

}  // namespace
}  // namespace tessera
