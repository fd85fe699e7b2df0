// Loads in which rank 0 reads for all (checkpoint-rows P-19), and checkpoints that ranks open
// together.
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>

#include "checkpoint/test_support.h"
#include "conformance/fake_device.h"
#include "tessera/restore.h"

namespace tessera {
namespace {

using namespace testing_support;

LoadOptions told() {
  LoadOptions options;
  options.reader = LoadReader::rank_zero;
  return options;
}

// Rank 0's is the file; nobody else has one.
std::string seen_by(const Group& group, const std::string& path) {
  return group.rank() == 0 ? path : "/nowhere/at/all";
}

const Shape kToldShape{1100, 1001};  // floats of more than one batch

Value whole_tree() {
  return Value::dict({{"w", Value(counting(kToldShape, whole(kToldShape), 0))},
                      {"v", Value(counting({5}, whole({5}), 7))},
                      {"n", 12},
                      {"deep", Value::dict({{"s", "text"}})}});
}

std::string saved(const std::string& name) {
  const std::string path = temporary_directory() + name;
  save(whole_tree(), path);
  return path;
}

Value empty_part(const Slice& slice) {
  return Value::dict({{"w", Value(counting(kToldShape, slice, 0, false))},
                      {"v", Value(counting({5}, whole({5}), 0, false))},
                      {"n", 0},
                      {"deep", Value::dict({{"s", ""}})}});
}

void expect_filled(const Value& tree) {
  const Tensor& w = tree.at("w").as_tensor();
  EXPECT_TRUE(floats(w) == floats(counting(kToldShape, w.pieces.at(0).slice, 0)));
  EXPECT_EQ(floats(tree.at("v").as_tensor()), floats(counting({5}, whole({5}), 7)));
  EXPECT_EQ(tree.at("n").as_int(), 12);
  EXPECT_EQ(tree.at("deep").at("s").as_string(), "text");
}

class Told : public testing::TestWithParam<const char*> {};

TEST_P(Told, RanksTakeRowsColumnsAndRangesFromAFileThatTheyDoNotSee) {
  const std::string path = saved(GetParam());
  const std::int64_t half = numel(kToldShape) / 2 + 3;
  const std::vector<std::vector<Slice>> cuts = {
      {chunk(kToldShape, 0, 3), chunk(kToldShape, 1, 3), chunk(kToldShape, 2, 3)},
      {chunk(kToldShape, 0, 3, 1), chunk(kToldShape, 1, 3, 1), chunk(kToldShape, 2, 3, 1)},
      {FlatRange{0, half}, FlatRange{half, numel(kToldShape)}, whole(kToldShape)}};
  for (const std::vector<Slice>& slices : cuts) {
    std::atomic<int> good = 0;
    run_ranks(3, [&](Group& group) {
      Value tree = empty_part(slices[static_cast<std::size_t>(group.rank())]);
      const LoadReport report = load(tree, seen_by(group, path), told(), group);
      expect_filled(tree);
      EXPECT_EQ(report.bytes_read > 0, group.rank() == 0);
      ++good;
    });
    EXPECT_EQ(good, 3);
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, Told, testing::Values("/a.pt", "/a.safetensors", "/a"));

// A rank that wants nothing takes part all the same.
TEST(ToldLoad, RanksWantDifferentKeys) {
  const std::string path = saved("/a.pt");
  run_ranks(3, [&](Group& group) {
    Value tree = Value::dict();
    if (group.rank() == 1) tree = Value::dict({{"v", 0}});  // a value's place takes a tensor
    if (group.rank() == 2) tree = Value::dict({{"n", 0}});
    load(tree, seen_by(group, path), told(), group);
    if (group.rank() == 1) {
      EXPECT_EQ(floats(tree.at("v").as_tensor()), floats(counting({5}, whole({5}), 7)));
    }
    if (group.rank() == 2) {
      EXPECT_EQ(tree.at("n").as_int(), 12);
    }
  });
}

TEST(ToldLoad, ElementsAreCastAndScattered) {
  const std::string path = saved("/a.pt");
  run_ranks(2, [&](Group& group) {
    // Every second double of a memory of ten.
    Tensor tensor = counting({5}, whole({5}), 0, false);
    tensor.dtype = DType::float64;
    tensor.pieces[0].storage = memory(80);
    tensor.pieces[0].storage->dtype = DType::float64;
    tensor.pieces[0].strides = {2};
    Value tree = Value::dict({{"v", Value(tensor)}});
    load(tree, seen_by(group, path), told(), group);
    const auto* data = reinterpret_cast<const double*>(tensor.pieces[0].storage->data);
    for (int i = 0; i < 5; ++i) {
      EXPECT_EQ(data[2 * i], 7 + i);
      EXPECT_EQ(data[2 * i + 1], 0);
    }
  });
}

TEST(ToldLoad, ADevicesMemoryIsFilled) {
  const std::string path = saved("/a.pt");
  run_ranks(2, [&](Group& group) {
    FakeDevice device;
    std::vector<std::byte> bytes(20);
    Tensor tensor = counting({5}, whole({5}), 0, false);
    auto storage = std::make_shared<Storage>();
    storage->device = std::make_shared<FakeMemory>(device, bytes);
    storage->size = bytes.size();
    tensor.pieces[0].storage = storage;
    Value tree = Value::dict({{"v", Value(tensor)}});
    load(tree, seen_by(group, path), told(), group);
    const std::vector<float> expected = floats(counting({5}, whole({5}), 7));
    EXPECT_EQ(std::memcmp(bytes.data(), expected.data(), bytes.size()), 0);
  });
}

// One memory for two keys, for which the checkpoint has other values on rank 1.
TEST(ToldLoad, TiedKeysAreCompared) {
  const std::string path = temporary_directory() + "/a.pt";
  save(Value::dict({{"a", Value(counting({6}, whole({6}), 1))},
                    {"b", Value(counting({6}, whole({6}), 1))},
                    {"c", Value(counting({6}, whole({6}), 2))}}),
       path);
  std::atomic<int> refused = 0, loaded = 0;
  run_ranks(2, [&](Group& group) {
    const Value tied(counting({6}, whole({6}), 0, false));
    Value good = Value::dict({{"a", tied}, {"b", tied}});
    load(good, seen_by(group, path), told(), group);
    if (floats(tied.as_tensor()) == floats(counting({6}, whole({6}), 1))) ++loaded;
    Value bad = Value::dict({{"a", tied}, {group.rank() == 1 ? "c" : "b", tied}});
    if (code_of([&] { load(bad, seen_by(group, path), told(), group); }) == ErrorCode::mismatch)
      ++refused;
  });
  EXPECT_EQ(loaded, 2);
  EXPECT_EQ(refused, 2);
}

TEST(ToldLoad, AValueThatHoldsTensorsIsRefusedIfItIsWanted) {
  const std::string path = temporary_directory() + "/a.pt";
  save(Value::dict({{"t", Value::tuple({Value(counting({3}, whole({3}), 1)), 5})}, {"n", 3}}),
       path);
  run_ranks(2, [&](Group& group) {
    Value tree = Value::dict({{"n", 0}});
    load(tree, seen_by(group, path), told(), group);
    EXPECT_EQ(tree.at("n").as_int(), 3);
    tree.set_item("t", 0);
    EXPECT_EQ(code_of([&] { load(tree, seen_by(group, path), told(), group); }),
              ErrorCode::unsupported);
  });
}

TEST(ToldLoad, WhatRankZeroMeetsIsThrownByAll) {
  const std::string path = saved("/a.pt");
  std::string text = text_of(path);
  text[text.size() / 2] ^= 1;  // in the large tensor
  write_text(path, text);
  std::atomic<int> corrupt = 0, missing = 0;
  run_ranks(3, [&](Group& group) {
    Value tree = empty_part(whole(kToldShape));
    if (code_of([&] { load(tree, seen_by(group, path), told(), group); }) == ErrorCode::corrupt)
      ++corrupt;
    if (code_of([&] { load(tree, "/nowhere", told(), group); }) == ErrorCode::not_found) ++missing;
  });
  EXPECT_EQ(corrupt, 3);
  EXPECT_EQ(missing, 3);
}

TEST(ToldLoad, AnyRankMayStopIt) {
  const std::string path = saved("/a.pt");
  std::atomic<int> stopped = 0;
  run_ranks(3, [&](Group& group) {
    std::stop_source stop;
    LoadOptions options = told();
    options.stop = stop.get_token();
    if (group.rank() == 2) options.progress = [&](const Progress&) { stop.request_stop(); };
    Value tree = empty_part(whole(kToldShape));
    if (code_of([&] { load(tree, seen_by(group, path), options, group); }) == ErrorCode::cancelled)
      ++stopped;
  });
  EXPECT_EQ(stopped, 3);
}

class Together : public testing::TestWithParam<const char*> {};

// What is there decides what is wanted.
TEST_P(Together, RanksOpenLookAndLoad) {
  const std::string path = saved(GetParam());
  for (const LoadReader reader : {LoadReader::every_rank, LoadReader::rank_zero}) {
    std::atomic<int> good = 0;
    run_ranks(3, [&](Group& group) {
      LoadOptions options;
      options.reader = reader;
      GroupCheckpoint checkpoint = GroupCheckpoint::open(path, options, group);
      EXPECT_EQ(checkpoint.contents().find("n")->value.as_int(), 12);
      const Tensor& w = checkpoint.contents().tensor("w");
      EXPECT_EQ(w.shape, kToldShape);
      EXPECT_EQ(w.dtype, DType::float32);
      for (int round = 0; round < 2; ++round) {
        Value tree = empty_part(chunk(w.shape, (group.rank() + round) % 3, 3));
        checkpoint.load(tree);
        expect_filled(tree);
      }
      ++good;
    });
    EXPECT_EQ(good, 3);
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, Together, testing::Values("/a.pt", "/a.safetensors", "/a"));

}  // namespace
}  // namespace tessera
