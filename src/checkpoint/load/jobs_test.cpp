#include "checkpoint/load/jobs.h"

#include <cstring>
#include <functional>
#include <vector>

#include <gtest/gtest.h>

#include "checkpoint/together/testing.h"
#include "conformance/fake_device.h"
#include "layout/strided.h"

namespace tessera {
namespace {

using namespace testing_support;

const Shape kWhole{31, 40, 25};

// "w" in three chunks, of which element i is i; "same" and "other" are like it, but "other" begins
// at 1.
std::shared_ptr<Store> compressed_chunks() {
  const auto store = memory_store();
  run_ranks(3, [&](Group& group) {
    const Placement rows{.parts = 3};
    const int rank = group.rank();
    const Value tree = Value::dict({{"w", part_of(kWhole, rows, rank, 0)},
                                    {"same", part_of(kWhole, rows, rank, 0)},
                                    {"other", part_of(kWhole, rows, rank, 1)}});
    (void)save(tree, store, {.compression = Compression::zstd}, group);
  });
  return store;
}

// Memory for `slices`, whose strides are `strides` where there are any.
Tensor place_for(const std::vector<Slice>& slices, DType dtype, const Shape& strides = {}) {
  Tensor tensor;
  tensor.dtype = dtype;
  tensor.shape = kWhole;
  tensor.sharded = true;
  for (const Slice& slice : slices) {
    const Shape sizes = array_of(slice);
    const std::int64_t reach = strides.empty() ? numel(slice) : strided_reach(sizes, strides);
    const auto bytes = static_cast<std::size_t>(reach + 3) * size_of(dtype);
    tensor.pieces.push_back({slice, memory(bytes), 3, strides, 0});
  }
  return tensor;
}

template <typename Number>
void expect_numbers(const Tensor& tensor) {
  for (const Piece& piece : tensor.pieces) {
    const Shape sizes = array_of(piece.slice);
    const Shape strides = piece.strides.empty() ? contiguous_strides(sizes) : piece.strides;
    const RunSequence runs(piece.slice, kWhole);
    for (std::int64_t r = 0; r < runs.size(); ++r) {
      for (std::int64_t i = 0; i < runs[r].count; ++i) {
        std::int64_t at = piece.storage_offset;
        std::int64_t rest = runs[r].local + i;
        for (std::size_t d = sizes.size(); d-- > 0; rest /= sizes[d])
          at += rest % sizes[d] * strides[d];
        Number found{};
        std::memcpy(&found, piece.storage->data + at * static_cast<std::int64_t>(sizeof found),
                    sizeof found);
        ASSERT_EQ(found, static_cast<Number>(runs[r].global + i)) << to_string(piece.slice);
      }
    }
  }
}

void load_as_w(const std::shared_ptr<Store>& store, const Tensor& wanted) {
  Value tree = Value::dict({{"w", wanted}});
  (void)load(tree, store);
}

// The pieces have memory of every kind that a load can fill (checkpoint-rows OQ-01).
TEST(ChunkJob, FillsMemoryOfEveryKind_OQ01) {
  const auto store = compressed_chunks();
  const std::vector<Slice> boxes = {Box{{0, 0, 0}, {31, 17, 25}}, Box{{3, 17, 4}, {20, 23, 20}},
                                    Box{{11, 0, 24}, {1, 40, 1}}};
  const std::vector<Slice> ranges = {FlatRange{1, 1003}, FlatRange{1003, 29'999},
                                     FlatRange{30'001, 31'000}};
  for (const auto& [slices, strides] :
       {std::pair(boxes, Shape{1, 31, 31 * 40}), std::pair(ranges, Shape{3})}) {
    for (const Shape& lie : {Shape(), strides}) {
      SCOPED_TRACE(to_string(lie));
      const Tensor same = place_for(slices, DType::float32, lie);
      load_as_w(store, same);
      expect_numbers<float>(same);
      const Tensor wider = place_for(slices, DType::float64, lie);
      load_as_w(store, wider);
      expect_numbers<double>(wider);
    }
  }
}

TEST(ChunkJob, FillsADevice_OQ01) {
  const auto store = compressed_chunks();
  FakeDevice device;
  std::vector<float> bytes(static_cast<std::size_t>(numel(kWhole)));
  const auto storage = std::make_shared<Storage>();
  storage->device = std::make_shared<FakeMemory>(device, std::as_writable_bytes(std::span(bytes)));
  storage->size = bytes.size() * 4;
  Tensor tensor;
  tensor.shape = kWhole;
  tensor.pieces.push_back({whole(kWhole), storage, 0, {}, 0});
  load_as_w(store, tensor);
  for (std::size_t i = 0; i < bytes.size(); ++i) ASSERT_EQ(bytes[i], static_cast<float>(i));
}

// Memory that two keys share is filled for one and compared for the other.
TEST(ChunkJob, ComparesWhatTwoKeysShare_OQ01) {
  const auto store = compressed_chunks();
  const Tensor shared = place_for({whole(kWhole)}, DType::float32);
  Value tree = Value::dict({{"w", shared}, {"same", shared}});
  (void)load(tree, store);
  expect_numbers<float>(shared);
  tree = Value::dict({{"w", shared}, {"other", shared}});
  EXPECT_EQ(code_of([&] { (void)load(tree, store); }), ErrorCode::mismatch);
}

}  // namespace
}  // namespace tessera
