// A save that compresses its items needs a few windows, whatever the size of the tensors
// (checkpoint-rows P-23).
#include <gtest/gtest.h>
#include <malloc.h>

#include <algorithm>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "checkpoint/dcp/item_writer.h"
#include "conformance/temporary_directory.h"
#include "heap.h"
#include "tessera/checkpoint.h"

namespace tessera {
namespace {

// Bytes that malloc has taken, those of zstd too, which `heap.h` does not see.
std::size_t taken() {
  const auto info = mallinfo2();
  return info.uordblks + info.hblkhd;
}

// Noise does not become smaller: a copy of what is compressed would be as large as the tensor.
Value noise(std::size_t bytes) {
  const auto owner = std::make_shared<std::vector<std::uint32_t>>(bytes / 4);
  std::mt19937 random(3);
  for (std::uint32_t& word : *owner) word = static_cast<std::uint32_t>(random());
  auto storage = std::make_shared<Storage>();
  storage->data = reinterpret_cast<std::byte*>(owner->data());
  storage->size = bytes;
  storage->owner = owner;
  Tensor tensor;
  tensor.shape = {static_cast<std::int64_t>(bytes / 4)};
  tensor.pieces.push_back({whole(tensor.shape), std::move(storage), 0, {}, -1});
  return Value::dict({{"w", tensor}});
}

TEST(CompressedSave, NeedsAFewWindows) {
  const TemporaryDirectory root;
  const Value tree = noise(std::size_t{96} << 20);
  std::size_t most = 0;
  const std::size_t before = taken();
  SaveOptions options{.threads = 1, .compression = Compression::zstd};
  options.progress = [&](const Progress&) { most = std::max(most, taken()); };
  const std::int64_t height = heap_height_of([&] { save(tree, root.path() + "/c", options); });
  EXPECT_LT(height, 8 << 20);
  ASSERT_GT(most, before);  // the hook is called while it is written
  EXPECT_LT(most - before, std::size_t{16} << 20);
}

// Nor does a load of it take more, however many pieces share the chunk (checkpoint-rows OQ-01).
TEST(CompressedLoad, NeedsAFewWindows) {
  const TemporaryDirectory root;
  constexpr std::int64_t kRows = 1024;
  constexpr std::int64_t kColumns = (std::int64_t{64} << 20) / 4 / kRows;
  Value tree = noise(std::size_t{64} << 20);
  Tensor& tensor = tree.at("w").as_tensor();
  tensor.shape = {kRows, kColumns};
  tensor.pieces[0].slice = whole(tensor.shape);
  save(tree, root.path() + "/c", {.threads = 1, .compression = Compression::zstd});
  const Piece all = tensor.pieces[0];
  tensor.pieces.clear();
  for (std::int64_t column = 0; column < kColumns; column += kColumns / 4) {
    tensor.pieces.push_back(
        {Box{{0, column}, {kRows, kColumns / 4}}, all.storage, column, {kColumns, 1}, 0});
  }
  std::size_t most = 0;
  const std::size_t before = taken();
  LoadOptions options{.threads = 2};
  options.progress = [&](const Progress&) { most = std::max(most, taken()); };
  const std::int64_t height = heap_height_of([&] { load(tree, root.path() + "/c", options); });
  EXPECT_LT(height, 8 << 20);
  ASSERT_GT(most, before);
  EXPECT_LT(most - before, std::size_t{16} << 20);
}

class Nowhere final : public ByteSink {
 public:
  void write_at(std::uint64_t, ByteView) override {}
  void commit() override {}
  [[nodiscard]] const std::string& name() const override { return name_; }

 private:
  std::string name_ = "nowhere";
};

// A window for each item would be most of the work if each has a file of its own.
TEST(SmallItems, TakeNoWindow) {
  const Value tree = noise(64);
  const Tensor& tensor = tree.at("w").as_tensor();
  for (const auto& level : {std::optional<int>(), std::optional(3)}) {
    const std::int64_t height = heap_height_of([&] {
      Nowhere sink;
      ItemWriter writer(sink, "nowhere", 1 << 20, level);
      writer.tensor(tensor.dtype, tensor.shape,
                    [&](std::int64_t begin, std::int64_t count, MutableByteView) {
                      const ByteView all(tensor.pieces[0].storage->data, 64);
                      return all.subspan(static_cast<std::size_t>(begin) * 4,
                                         static_cast<std::size_t>(count) * 4);
                    });
      writer.value(Value(7));
    });
    EXPECT_LT(height, 16 << 10);
  }
}

}  // namespace
}  // namespace tessera
