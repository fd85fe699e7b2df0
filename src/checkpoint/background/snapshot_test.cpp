// The copy of a tree in an arena.
#include "checkpoint/background/snapshot.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <numeric>

#include "checkpoint/background/testing.h"
#include "comm/testing.h"
#include "conformance/fake_device.h"
#include "value/storage_reader.h"

namespace tessera {
namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)

std::vector<std::byte> bytes_in(const Storage& storage) {
  std::vector<std::byte> bytes(static_cast<std::size_t>(storage.size));
  StorageReader(storage).read(0, bytes);
  return bytes;
}

const Storage& storage_at(const Value& tree, const char* key, std::size_t piece = 0) {
  return *tree.at(key).as_tensor().pieces.at(piece).storage;
}

// A storage over bytes of somebody else's.
std::shared_ptr<Storage> over(std::byte* data, std::uint64_t size) {
  auto storage = std::make_shared<Storage>();
  storage->data = data;
  storage->size = size;
  return storage;
}

Tensor flat(std::shared_ptr<Storage> storage, std::int64_t offset, std::int64_t count) {
  Tensor tensor;
  tensor.shape = {count};
  tensor.pieces.push_back({whole({count}), std::move(storage), offset, {}, -1});
  return tensor;
}

TEST(TreeSnapshot, SharesNoMemoryWithTheTreeAndKeepsItsForm) {
  const auto storage = memory(64);
  std::iota(reinterpret_cast<unsigned char*>(storage->data),
            reinterpret_cast<unsigned char*>(storage->data) + 64, 1);
  storage->location = "cuda:1";
  Tensor transposed = flat(storage, 1, 6);
  transposed.shape = {2, 3};
  transposed.pieces[0].slice = whole({2, 3});
  transposed.pieces[0].strides = {1, 2};
  transposed.pieces[0].neg = true;
  const Value tensor(flat(storage, 4, 8));
  const Value tree = Value::dict({{"a", Value(transposed)},
                                  {"b", tensor},
                                  {"same", tensor},
                                  {"in", Value::tuple({tensor, 3, "text"})},
                                  {"none", Value()}});
  Arena arena(0, 2);
  TreeSnapshot snapshot(tree);
  EXPECT_EQ(snapshot.bytes(), 128U) << "one storage, which three places share";
  const Value copy = snapshot.take(arena, 2, nullptr);
  EXPECT_EQ(copy, tree);
  EXPECT_EQ(&storage_at(copy, "a"), &storage_at(copy, "b"));
  EXPECT_EQ(copy.at("b").identity(), copy.at("same").identity());
  EXPECT_EQ(copy.at("in").at(0).identity(), copy.at("same").identity());
  EXPECT_TRUE(copy.at("a").as_tensor().pieces[0].neg);
  EXPECT_EQ(storage_at(copy, "a").location, "cuda:1");
  const auto before = bytes_in(*storage);
  std::memset(storage->data, 0, 64);
  EXPECT_EQ(bytes_in(storage_at(copy, "b")), before);
}

TEST(TreeSnapshot, BytesThatStoragesShareAreCopiedOnce) {
  std::vector<std::byte> bytes(100'000);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * 7);
  std::byte* data = bytes.data();
  const Value tree = Value::dict({{"all", Value(flat(over(data, 80'000), 0, 4))},
                                  {"again", Value(flat(over(data, 80'000), 0, 4))},
                                  {"first", Value(flat(over(data, 400), 0, 4))},
                                  {"middle", Value(flat(over(data + 40'000, 400), 0, 4))},
                                  {"beyond", Value(flat(over(data + 60'000, 40'000), 0, 4))},
                                  {"empty", Value(flat(over(nullptr, 0), 0, 0))}});
  TreeSnapshot snapshot(tree);
  EXPECT_LT(snapshot.bytes(), bytes.size() + 192);
  Arena arena(0, 2);
  const Value copy = snapshot.take(arena, 2, nullptr);
  for (const auto& [key, tensor] : copy.pairs()) {
    const char* name = key.as_string().c_str();
    EXPECT_EQ(bytes_in(storage_at(copy, name)), bytes_in(storage_at(tree, name))) << name;
  }
}

// An arena that was made for a tree has room for it when its tensors have moved.
TEST(TreeSnapshot, NeedsAsMuchWhereverTheTensorsLie) {
  std::vector<std::byte> bytes(10'000);
  const auto needed = [&](std::size_t shift) {
    const Value tree =
        Value::dict({{"a", Value(flat(over(bytes.data() + shift, 1000), 0, 4))},
                     {"b", Value(flat(over(bytes.data() + 3 * shift + 1000, 100), 0, 4))},
                     {"none", Value(flat(over(nullptr, 0), 0, 0))}});
    return TreeSnapshot(tree).bytes();
  };
  for (const std::size_t shift : {4, 8, 60, 64, 1000}) EXPECT_EQ(needed(shift), needed(0)) << shift;
}

TEST(TreeSnapshot, CopiesViewsSourcesAndDevices) {
  std::vector<float> values(3'000'000);
  std::iota(values.begin(), values.end(), 1.0F);
  const ByteView bytes = std::as_bytes(std::span(values));
  std::vector<std::byte> on_device(bytes.begin(), bytes.end());
  FakeDevice device;
  auto storage = std::make_shared<Storage>();
  storage->device = std::make_shared<FakeMemory>(device, on_device);
  storage->size = on_device.size();
  const Shape shape{static_cast<std::int64_t>(values.size())};
  Value tree = Value::dict(
      {{"view", Value(ConstTensorView::of(values.data(), DType::float32, shape).tensor())},
       {"device", Value(flat(storage, 0, shape[0]))}});
  const auto expected = values;
  Arena arena(0, 2);
  const Value copy = TreeSnapshot(tree).take(arena, 2, nullptr);
  std::ranges::fill(values, 0.0F);
  std::ranges::fill(on_device, std::byte{0});
  EXPECT_EQ(floats(copy.at("view").as_tensor()), expected);
  EXPECT_EQ(floats(copy.at("device").as_tensor()), expected);
  device.fail(1);
  const Error error = error_of([&] { (void)TreeSnapshot(tree).take(arena, 2, nullptr); });
  EXPECT_EQ(error.code(), ErrorCode::io) << error.what();
}

TEST(TreeSnapshot, RefusesWhatASaveRefuses) {
  Value loop = Value::list();
  loop.items().push_back(loop);
  EXPECT_EQ(code_of([&] { TreeSnapshot snapshot(loop); }), ErrorCode::invalid_argument);
  loop.items().clear();
  const Value tree = Value::dict({{"w", Value::dict({{"x", Value(flat(memory(8), 0, 3))}})}});
  const Error error = error_of([&] { TreeSnapshot snapshot(tree); });
  EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
  EXPECT_EQ(error.key(), "w.x");
}

TEST(Arena, IsOneForAllAndGrowsUnlessItsSizeIsGiven) {
  Arena grows(0, 2);
  const auto first = grows.room(1'000'000);
  EXPECT_EQ(grows.room(10).data(), first.data());
  EXPECT_EQ(grows.room(1'000'000).data(), first.data());
  EXPECT_EQ(grows.room(3'000'000).size(), 3'000'000U);
  Arena fixed(4096, 1);
  EXPECT_EQ(fixed.room(4096).size(), 4096U);
  const Error error = error_of([&] { (void)fixed.room(4097); });
  EXPECT_EQ(error.code(), ErrorCode::limit);
  EXPECT_NE(std::string(error.what()).find("4097 bytes of an arena of 4096"), std::string::npos)
      << error.what();
  EXPECT_EQ(fixed.room(1).size(), 1U) << "as before";
  EXPECT_EQ(code_of([] { Arena none(1ULL << 60U, 1); }), ErrorCode::io);
}

// The child neither has the pages nor takes away what it has at their place.
TEST(Arena, IsNotInChildrenOfFork_R18) {
  Arena arena(1 << 20, 1);
  std::byte* const at = arena.room(1 << 20).data();
  *at = std::byte{7};
  const pid_t child = run_process([&] {
    unsigned char resident = 0;
    return ::mincore(at, 1, &resident) == -1 && errno == ENOMEM ? 0 : 1;
  });
  EXPECT_EQ(end_of(child), 0);
  EXPECT_EQ(*at, std::byte{7});
}

TEST(Pace, LetsSoManyBytesPassAndHeedsAStop) {
  const auto begin = std::chrono::steady_clock::now();
  const auto pace = std::make_shared<Pace>(10'000'000);
  parallel_for(2, 4, [&](std::size_t) { pace->pass(500'000); });
  EXPECT_GE(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(199));
  std::stop_source stop;
  stop.request_stop();
  const HeedStop heeding(stop.get_token());
  EXPECT_EQ(code_of([&] { pace->pass(1ULL << 40U); }), ErrorCode::cancelled);
}

}  // namespace
}  // namespace tessera
