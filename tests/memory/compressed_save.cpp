// A save that compresses its items needs a few windows, whatever the size of the tensors
// (checkpoint-rows P-23).
#include <gtest/gtest.h>
#include <malloc.h>

#include <algorithm>
#include <random>
#include <vector>

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

}  // namespace
}  // namespace tessera
