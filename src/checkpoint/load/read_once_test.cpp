// How much of a checkpoint a load reads.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <mutex>
#include <numeric>
#include <variant>

#include "checkpoint/together/testing.h"
#include "io/testing.h"
#include "layout/boxes.h"
#include "layout/plan.h"

namespace tessera {
namespace {

using namespace testing_support;

// A file of a store where a request costs as much as so many bytes.
class PricedSource final : public ByteSource {
 public:
  PricedSource(std::shared_ptr<const ByteSource> source, std::uint64_t cost)
      : source_(std::move(source)), cost_(cost) {}
  [[nodiscard]] std::uint64_t size() const override { return source_->size(); }
  void read_at(std::uint64_t offset, MutableByteView out) const override {
    source_->read_at(offset, out);
  }
  [[nodiscard]] const std::string& name() const override { return source_->name(); }
  [[nodiscard]] std::uint64_t request_cost() const override { return cost_; }

 private:
  std::shared_ptr<const ByteSource> source_;
  std::uint64_t cost_;
};

// Counts what is read of data files.
class DataCountingStore final : public testing_support::ForwardingStore {
 public:
  explicit DataCountingStore(std::shared_ptr<Store> store, std::uint64_t cost = kNearRequest)
      : ForwardingStore(std::move(store)), cost_(cost) {}
  [[nodiscard]] std::shared_ptr<ByteSource> open(std::string_view name) const override {
    auto source = inner().open(name);
    if (!name.ends_with(".distcp")) return source;
    if (cost_ != kNearRequest) source = std::make_shared<PricedSource>(std::move(source), cost_);
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
  const std::uint64_t cost_;
  mutable std::mutex mutex_;
  mutable std::vector<std::shared_ptr<CountingSource>> counted_;  // guarded by mutex_
};

std::uint64_t bytes_of_data(const Store& store) {
  std::uint64_t saved = 0;
  for (const ObjectInfo& file : store.list())
    if (file.name.ends_with(".distcp")) saved += file.size;
  return saved;
}

// Saved by so many ranks, each of which has a row of chunks.
std::shared_ptr<Store> saved_by(int ranks, const Shape& shape, Compression compression) {
  const auto store = memory_store();
  run_ranks(ranks, [&](Group& group) {
    const Tensor tensor = part_of(shape, {.parts = ranks}, group.rank(), 0);
    (void)save(Value::dict({{"w", tensor}}), store, {.compression = compression}, group);
  });
  return store;
}

// Element i of the tensor is i.
void expect_loaded(const Tensor& tensor) {
  for (const Piece& piece : tensor.pieces) {
    const RunSequence runs(piece.slice, tensor.shape);
    for (std::int64_t r = 0; r < runs.size(); ++r) {
      std::vector<float> found(static_cast<std::size_t>(runs[r].count));
      std::vector<float> wanted(found.size());
      std::iota(wanted.begin(), wanted.end(), static_cast<float>(runs[r].global));
      std::memcpy(found.data(), piece.storage->data + runs[r].local * 4, found.size() * 4);
      ASSERT_TRUE(found == wanted) << to_string(piece.slice);
    }
  }
}

Tensor tensor_of(const Shape& shape, const std::vector<Slice>& slices) {
  Tensor tensor;
  tensor.shape = shape;
  tensor.sharded = true;
  for (const Slice& slice : slices)
    tensor.pieces.push_back({slice, memory(static_cast<std::size_t>(numel(slice)) * 4), 0, {}, 0});
  return tensor;
}

// Four bands of rows, with rows between them that the tree does not hold.
Tensor bands_of(const Shape& shape) {
  std::vector<Slice> bands;
  for (std::int64_t band = 0; band < 4; ++band)
    bands.push_back(Box{{band * (shape[0] / 4), 0}, {shape[0] / 10, shape[1]}});
  return tensor_of(shape, bands);
}

// What a load read may be a quarter more than is saved: digests at a file's end are read apart.
void expect_read_once(const std::shared_ptr<Store>& store, const Tensor& wanted, int threads) {
  const auto counting = std::make_shared<DataCountingStore>(store);
  Value state = Value::dict({{"w", wanted}});
  (void)load(state, counting, {.threads = threads});
  expect_loaded(wanted);
  EXPECT_GT(counting->bytes(), 0U);
  EXPECT_LE(counting->bytes(), bytes_of_data(*store) * 5 / 4);
}

constexpr Compression kCompressions[] = {Compression::none, Compression::zstd};

TEST(ReadOnce, AChunkThatSeveralRunsNeed_OQ01) {
  const Shape shape{2048, 1024};  // 8 MiB, which a save by one process writes as one chunk
  for (const Compression compression : kCompressions)
    expect_read_once(saved_by(1, shape, compression), bands_of(shape), 1);
}

// Compressed chunks are read once, whatever the pieces are: rows of several chunks, columns, shards
// of a flat parameter; and threads do not begin one chunk apiece.
TEST(ReadOnce, CompressedChunksThatPiecesOfAnyCutShare_OQ01) {
  const Shape shape{1001, 1024};
  const auto store = saved_by(3, shape, Compression::zstd);
  const std::int64_t third = numel(shape) / 3;
  for (const int threads : {1, 4}) {
    SCOPED_TRACE(threads);
    expect_read_once(store, bands_of(shape), threads);
    std::vector<Slice> columns;
    for (std::int64_t column = 0; column < 1024; column += 128)
      columns.push_back(Box{{0, column}, {1001, 128}});
    expect_read_once(store, tensor_of(shape, columns), threads);
    expect_read_once(store,
                     tensor_of(shape, {FlatRange{5, third}, FlatRange{third, 2 * third + 7},
                                       FlatRange{2 * third + 7, numel(shape)}}),
                     threads);
  }
}

TEST(ReadOnce, CompressedChunksByEachOfNRanks_OQ01) {
  const Shape shape{1001, 1024};
  const auto store = saved_by(2, shape, Compression::zstd);
  const auto counting = std::make_shared<DataCountingStore>(store);
  run_ranks(3, [&](Group& group) {
    Tensor wanted = part_of(shape, {.parts = 3, .dim = 1}, group.rank(), 7);
    Value state = Value::dict({{"w", wanted}});
    (void)load(state, counting, {.threads = 2}, group);
    expect_loaded(wanted);
  });
  EXPECT_LE(counting->bytes(), 3 * bytes_of_data(*store) * 5 / 4);
}

constexpr int kTensors = 12;
const Shape kFourMiB{1024, 1024};  // in four parts: 1 MiB each

std::string name_of(int i) {
  return "w" + std::to_string(i);
}

// What a rank of so many holds of the tensors; those of a tree that saves have their elements.
Value rows_of_all(int rank, int ranks, bool is_saved) {
  Value tree = Value::dict();
  for (int i = 0; i < kTensors; ++i) {
    const Box rows = chunk(kFourMiB, rank, ranks);
    // A load asks in another order than that of the files.
    const int number = is_saved ? i : (i * 7 + 3) % kTensors;
    tree.set_item(name_of(number), counting(kFourMiB, rows, static_cast<float>(number), is_saved));
  }
  return tree;
}

void expect_read(const Value& tree, int rank, int ranks) {
  for (int i = 0; i < kTensors; ++i) {
    const Tensor expected = counting(kFourMiB, chunk(kFourMiB, rank, ranks), static_cast<float>(i));
    EXPECT_TRUE(floats(tree.at(name_of(i)).as_tensor()) == floats(expected)) << i;
  }
}

constexpr double kOver = 1.05;  // what is read, beside what is loaded
constexpr std::uint64_t kLoaded = kTensors * (4U << 20U);

// Loaded by `load`, which gets the store and the tree of a rank.
using Load = std::function<void(Value&, const std::shared_ptr<Store>&, int threads, Group&)>;

// Pieces that lie one behind the other in a file have a block of digests in common, which is read
// once, whichever threads have them.
void expect_blocks_read_once(int ranks, std::uint64_t cost, const Load& load_tree) {
  const auto store = memory_store();
  run_ranks(ranks, [&](Group& group) {
    (void)save(rows_of_all(group.rank(), ranks, true), store, group);
  });
  for (const int threads : {1, 2, 7}) {
    SCOPED_TRACE(::testing::Message() << ranks << " ranks, " << threads << " threads, " << cost);
    const auto counting = std::make_shared<DataCountingStore>(store, cost);
    run_ranks(ranks, [&](Group& group) {
      Value tree = rows_of_all(group.rank(), ranks, false);
      load_tree(tree, counting, threads, group);
      expect_read(tree, group.rank(), ranks);
    });
    EXPECT_LE(static_cast<double>(counting->bytes()), kOver * static_cast<double>(kLoaded));
  }
}

void expect_blocks_read_once(const Load& load_tree) {
  for (const int ranks : {1, 4}) expect_blocks_read_once(ranks, kNearRequest, load_tree);
  // Blocks of files far away are kept for the process: by one for each rank.
  expect_blocks_read_once(1, 1U << 20U, load_tree);
}

TEST(ReadOnce, DigestBlocksThatPiecesShareByALoad) {
  expect_blocks_read_once(
      [](Value& tree, const std::shared_ptr<Store>& store, int threads, Group& group) {
        (void)load(tree, store, {.threads = threads}, group);
      });
}

TEST(ReadOnce, DigestBlocksThatPiecesShareByReadMany) {
  expect_blocks_read_once(
      [](Value& tree, const std::shared_ptr<Store>& store, int threads, Group& group) {
        const Checkpoint checkpoint = Checkpoint::open(store);
        std::vector<ReadRequest> requests;
        for (int i = 0; i < kTensors; ++i) {
          const std::string name = name_of((i * 5 + group.rank()) % kTensors);
          const Piece& piece = tree.at(name).as_tensor().pieces[0];
          const auto to =
              TensorView::of(piece.storage->data, DType::float32, std::get<Box>(piece.slice).sizes);
          requests.push_back({name, to, piece.slice});
        }
        (void)checkpoint.read_many(requests, {.threads = threads});
      });
}

}  // namespace
}  // namespace tessera
