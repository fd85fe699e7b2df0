// How much of a checkpoint a load reads.
#include <gtest/gtest.h>

#include <cstring>
#include <mutex>
#include <variant>

#include "checkpoint/together/testing.h"
#include "io/counting.h"

namespace tessera {
namespace {

using namespace testing_support;

// Counts what is read of data files.
class DataCountingStore final : public testing::ForwardingStore {
 public:
  using ForwardingStore::ForwardingStore;
  [[nodiscard]] std::shared_ptr<ByteSource> open(std::string_view name) const override {
    auto source = inner().open(name);
    if (!name.ends_with(".distcp")) return source;
    const std::lock_guard lock(mutex_);
    counted_.push_back(std::make_shared<CountingSource>(std::move(source)));
    return counted_.back();
  }
  [[nodiscard]] std::uint64_t bytes() const {
    std::uint64_t sum = 0;
    for (const auto& source : counted_) sum += source->bytes();
    return sum;
  }

 private:
  mutable std::mutex mutex_;
  mutable std::vector<std::shared_ptr<CountingSource>> counted_;  // guarded by mutex_
};

// Four bands of rows, with rows between them that the tree does not hold.
Tensor bands_of(const Shape& shape) {
  Tensor tensor;
  tensor.dtype = DType::float32;
  tensor.shape = shape;
  tensor.sharded = true;
  for (std::int64_t row = 0; row < shape[0]; row += shape[0] / 4) {
    const Box box{{row, 0}, {shape[0] / 10, shape[1]}};
    tensor.pieces.push_back({box, memory(static_cast<std::size_t>(numel(box)) * 4), 0, {}, 0});
  }
  return tensor;
}

TEST(ReadOnce, AChunkThatSeveralRunsNeed_OQ01) {
  const Shape shape{2048, 1024};  // 8 MiB, which a save by one process writes as one chunk
  const auto store = memory_store();
  (void)save(Value::dict({{"w", part_of(shape, {}, 0, 0)}}), store);
  std::uint64_t saved = 0;
  for (const ObjectInfo& file : store->list())
    if (file.name.ends_with(".distcp")) saved += file.size;
  const auto counting = std::make_shared<DataCountingStore>(store);
  Value state = Value::dict({{"w", bands_of(shape)}});
  (void)load(state, counting);
  for (const Piece& piece : state.at("w").as_tensor().pieces) {
    float first = 0;
    std::memcpy(&first, piece.storage->data, 4);
    EXPECT_EQ(first, static_cast<float>(std::get<Box>(piece.slice).offsets[0] * shape[1]));
  }
  EXPECT_GT(counting->bytes(), 0U);
  EXPECT_LE(counting->bytes(), saved + saved / 4);  // the digests at its end are read apart
}

}  // namespace
}  // namespace tessera
