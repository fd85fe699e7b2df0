#include "checkpoint/read/item_windows.h"

#include <gtest/gtest.h>
#include <zstd.h>

#include <functional>

#include "checkpoint/test_support.h"
#include "format/torch/torch_file.h"
#include "layout/boxes.h"
#include "layout/plan.h"

namespace tessera {
namespace {

using namespace testing_support;

const Shape kShape{50, 40, 60};  // 480,000 bytes of float32
const Box kChunk{{10, 0, 0}, {30, 40, 60}};

std::vector<std::byte> archive_of(const Shape& sizes, const std::string& root = "archive") {
  return torch_file::write(Value(counting(sizes, whole(sizes), 7)), root);
}

// A frame around such an archive.
Piece item_around(const std::vector<std::byte>& archive) {
  std::vector<std::byte> frame(ZSTD_compressBound(archive.size()));
  frame.resize(ZSTD_compress(frame.data(), frame.size(), archive.data(), archive.size(), 3));
  auto storage = std::make_shared<Storage>();
  storage->size = frame.size();
  storage->source = memory_source(std::move(frame), "a.distcp");
  storage->encoding = Encoding::torch_item_zstd;
  return {kChunk, std::move(storage), 0, {}, -1};
}

Tensor tensor_with(Piece piece, DType dtype = DType::float32) {
  Tensor tensor;
  tensor.dtype = dtype;
  tensor.shape = kShape;
  tensor.pieces.push_back(std::move(piece));
  return tensor;
}

bool visit(const Tensor& tensor, std::size_t window, const VisitWindow& fn) {
  IoReport report;
  const bool done = visit_item(tensor, tensor.pieces[0], "w", window, fn, report);
  EXPECT_EQ(report.bytes_read, done ? tensor.pieces[0].storage->size : 0);
  return done;
}

ErrorCode refusal_of(const Piece& piece) {
  const Error error =
      error_of([&] { (void)visit(tensor_with(piece), 4096, [](const Tensor&) {}); });
  EXPECT_EQ(error.key(), "w");
  EXPECT_EQ(error.path(), "a.distcp");
  return error.code();
}

TEST(ItemWindows, HaveEachElementOnceAndAreBounded_OQ01) {
  const Tensor tensor = tensor_with(item_around(archive_of(kChunk.sizes)));
  for (const std::size_t window : {1, 1000, 10'000, 1 << 20}) {
    std::vector<float> found(static_cast<std::size_t>(numel(kShape)), -1);
    ASSERT_TRUE(visit(tensor, window, [&](const Tensor& part) {
      EXPECT_LE(part.pieces.at(0).storage->size, std::max<std::size_t>(window, 4));
      for (const Piece& piece : part.pieces) {
        const RunSequence runs(piece.slice, kShape);
        ASSERT_EQ(runs.size(), 1);
        const auto* values = reinterpret_cast<const float*>(piece.storage->data);
        for (std::int64_t i = 0; i < runs[0].count; ++i) {
          float& here = found[static_cast<std::size_t>(runs[0].global + i)];
          EXPECT_EQ(here, -1);
          here = values[piece.storage_offset + i];
        }
      }
    }));
    for (std::int64_t i = 0; i < numel(kShape); ++i) {
      const std::int64_t local = i - 10 * 40 * 60;
      const bool inside = local >= 0 && local < numel(kChunk);
      ASSERT_EQ(found[static_cast<std::size_t>(i)], inside ? 7.0F + static_cast<float>(local) : -1);
    }
  }
}

// As PyTorch wrote it (checkpoint-rows P-23).
TEST(ItemWindows, KnowPyTorchsItems_OQ01) {
  const Checkpoint checkpoint =
      Checkpoint::open(std::string(TESSERA_TEST_DATA) + "/golden/variants/c_zstd");
  int visited = 0;
  for (const Leaf& leaf : checkpoint.leaves) {
    if (!leaf.value.is(Value::Kind::tensor)) continue;
    const Tensor& tensor = leaf.value.as_tensor();
    for (const Piece& piece : tensor.pieces) {
      ASSERT_EQ(piece.storage->encoding, Encoding::torch_item_zstd);
      IoReport report;
      EXPECT_TRUE(visit_item(
          tensor, piece, leaf.name, 64, [](const Tensor&) {}, report))
          << leaf.name;
      ++visited;
    }
  }
  EXPECT_GT(visited, 0);
}

// Nothing can be told from the head of such an item.
TEST(ItemWindows, LeaveOtherItemsAlone_OQ01) {
  const auto never = [](const Tensor&) { FAIL(); };
  for (const auto& archive :
       {archive_of(kChunk.sizes, "other"), archive_of({40, 30, 60}), std::vector<std::byte>()})
    EXPECT_FALSE(visit(tensor_with(item_around(archive)), 4096, never));
  const Piece item = item_around(archive_of(kChunk.sizes));
  EXPECT_FALSE(visit(tensor_with(item, DType::int32), 4096, never));
}

TEST(ItemWindows, CompareWhatStandsBehindTheElements_OQ01) {
  const std::vector<std::byte> good = archive_of(kChunk.sizes);
  std::vector<std::byte> changed = good;
  changed[good.size() / 2] ^= std::byte{1};  // an element
  EXPECT_EQ(refusal_of(item_around(changed)), ErrorCode::corrupt);
  changed = good;
  changed[good.size() - 30] ^= std::byte{1};  // of the end record
  EXPECT_EQ(refusal_of(item_around(changed)), ErrorCode::corrupt);
  changed = good;
  changed.resize(good.size() / 2);
  EXPECT_EQ(refusal_of(item_around(changed)), ErrorCode::incomplete);
  changed = good;
  changed.resize(good.size() + (17U << 20));
  EXPECT_EQ(refusal_of(item_around(changed)), ErrorCode::limit);
  Piece cut = item_around(good);
  cut.storage->size -= 10;
  EXPECT_EQ(refusal_of(cut), ErrorCode::incomplete);
}

}  // namespace
}  // namespace tessera
