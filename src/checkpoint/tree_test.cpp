// Trees of checkpoints and what a load makes of a caller's tree (issue 15, 7.6).
#include <random>

#include "checkpoint/load/fill.h"
#include "checkpoint/test_support.h"

namespace tessera {
namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)

Value four(float first, bool fill = true) {
  return Value(counting({4}, whole({4}), first, fill));
}

// The same tree as a DCP directory and as a torch.save file.
std::vector<std::string> both_kinds(const Value& tree) {
  const std::string root = temporary_directory();
  save(tree, root + "/c", *solo_group());
  ConvertOptions options;
  options.to = CheckpointKind::torch_file;
  convert(root + "/c", root + "/c.pt", options);
  return {root + "/c", root + "/c.pt"};
}

TEST(Tree, IsOnesOwnToChange) {
  for (const std::string& path : both_kinds(Value::dict({{"w", four(0)}, {"n", 3}}))) {
    const Checkpoint checkpoint = Checkpoint::open(path);
    Value tree = checkpoint.tree();
    tree.set_item("n", 4);
    Value tensor = tree.at("w");
    tensor.as_tensor().shape = {2, 2};
    tensor.as_tensor().pieces[0].storage->offset = 1;
    const Value again = checkpoint.tree();
    EXPECT_EQ(again.at("n").as_int(), 3) << path;
    EXPECT_EQ(again.at("w").as_tensor().shape, Shape{4}) << path;
    EXPECT_EQ(floats(checkpoint.load().at("w").as_tensor()), (std::vector<float>{0, 1, 2, 3}));
  }
}

TEST(Tree, TrimmedLeavesLimitItForEveryKind) {
  const Value tree = Value::dict({{"a", four(0)}, {"b", Value::dict({{"c", four(4)}, {"d", 5}})}});
  for (const std::string& path : both_kinds(tree)) {
    Checkpoint checkpoint = Checkpoint::open(path);
    std::erase_if(checkpoint.leaves, [](const Leaf& leaf) { return leaf.name != "b.c"; });
    for (const Value& got : {checkpoint.tree(), checkpoint.load()}) {
      EXPECT_EQ(got.size(), 1U) << path;
      EXPECT_EQ(got.at("b").size(), 1U) << path;
    }
    EXPECT_EQ(floats(checkpoint.load().at("b").at("c").as_tensor()),
              (std::vector<float>{4, 5, 6, 7}));
  }
}

TEST(Tree, ATensorOfATemporaryOutlivesIt) {
  const Checkpoint checkpoint = Checkpoint::open(both_kinds(Value::dict({{"w", four(1)}}))[0]);
  const Tensor& tensor = checkpoint.load().at("w").as_tensor();
  EXPECT_EQ(floats(tensor), (std::vector<float>{1, 2, 3, 4}));
}

TEST(Tree, TensorsInTuplesAreInMemoryToo) {
  const Value tree = Value::dict({{"t", Value::tuple({7, four(2)})}});
  for (const std::string& path : both_kinds(tree)) {
    const Value loaded = Checkpoint::open(path).load();
    const Tensor& tensor = loaded.at("t").items()[1].as_tensor();
    ASSERT_NE(tensor.pieces.at(0).storage->data, nullptr) << path;
    EXPECT_EQ(floats(tensor), (std::vector<float>{2, 3, 4, 5})) << path;
  }
}

TEST(Tree, APlaceholderBecomesATensorWithData) {
  const Value saved = Value::dict({{"w", four(0)}, {"t", Value::tuple({four(9)})}, {"n", 3}});
  for (const std::string& path : both_kinds(saved)) {
    Value tree = Value::dict({{"w", Value()}, {"t", Value()}, {"n", Value()}});
    load(tree, path, *solo_group());
    EXPECT_EQ(tree.at("n").as_int(), 3);
    EXPECT_EQ(floats(tree.at("w").as_tensor()), (std::vector<float>{0, 1, 2, 3})) << path;
    EXPECT_EQ(floats(tree.at("t").items()[0].as_tensor()), (std::vector<float>{9, 10, 11, 12}));
  }
}

TEST(Tree, APlaceholderUnderAnIntegerKeyIsReplaced) {
  const Value saved = Value::dict({{"s", Value::dict({{0, Value::dict({{"step", 5}})}})}});
  for (const std::string& path : both_kinds(saved)) {
    Value tree = Value::dict({{"s", Value::dict({{0, Value::dict({{"step", 0}})}})}});
    load(tree, path, *solo_group());
    const auto& [key, state] = tree.at("s").pairs().at(0);
    EXPECT_EQ(key.as_int(), 0) << path;
    EXPECT_EQ(state.at("step").as_int(), 5) << path;
  }
}

TEST(Load, ReportsTheKeysThatTheCheckpointLacks) {
  const std::string path = both_kinds(Value::dict({{"w", four(0)}}))[0];
  Value tree = Value::dict({{"z", four(5)}, {"w", four(0, false)}, {"a", Value::dict({{"b", 1}})}});
  LoadOptions options;
  options.missing = OnDifference::report;
  const LoadReport report = load(tree, path, options, *solo_group());
  EXPECT_EQ(report.missing, (std::vector<std::string>{"a.b", "z"}));
  EXPECT_EQ(report.bytes_needed, 16U);
  EXPECT_EQ(floats(tree.at("z").as_tensor()), (std::vector<float>{5, 6, 7, 8}));
  Value complete = Value::dict({{"w", four(0, false)}});
  EXPECT_TRUE(load(complete, path, *solo_group()).missing.empty());
}

TEST(Load, TwoKeysWithOneMemoryAreRefusedWhereTheCheckpointDiffers) {
  const std::string tied = both_kinds(Value::dict({{"a", four(3)}, {"b", four(3)}}))[0];
  const std::string untied = both_kinds(Value::dict({{"a", four(3)}, {"b", four(4)}}))[0];
  Value tree = Value::dict({{"a", four(0, false)}});
  tree.set_item("b", tree.at("a"));
  load(tree, tied, *solo_group());
  EXPECT_EQ(floats(tree.at("b").as_tensor()), (std::vector<float>{3, 4, 5, 6}));
  const Error error = error_of([&] { load(tree, untied, *solo_group()); });
  EXPECT_EQ(error.code(), ErrorCode::mismatch);
  EXPECT_EQ(error.key(), "b");
  EXPECT_NE(error.message().find("'a'"), std::string::npos);
}

TEST(Load, KeysWhoseMemoryOverlapsAreRefused) {
  const std::string path = both_kinds(Value::dict({{"a", four(3)}, {"b", four(3)}}))[0];
  const auto storage = memory(24);
  Tensor first = counting({4}, whole({4}), 0, false);
  first.pieces[0].storage = storage;
  Tensor second = first;
  second.pieces[0].storage_offset = 2;
  Value tree = Value::dict({{"a", first}, {"b", second}});
  const Error error = error_of([&] { load(tree, path, *solo_group()); });
  EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
  EXPECT_EQ(error.key(), "b");
  EXPECT_NE(error.message().find("'a'"), std::string::npos);
}

// Columns of one matrix lie between one another and are apart.
TEST(Load, InterleavedKeysAreFilled) {
  const std::string path = both_kinds(Value::dict({{"a", four(0)}, {"b", four(10)}}))[0];
  const auto storage = memory(32);
  Tensor first = counting({4}, whole({4}), 0, false);
  first.pieces[0].storage = storage;
  first.pieces[0].strides = {2};
  Tensor second = first;
  second.pieces[0].storage_offset = 1;
  Value tree = Value::dict({{"a", first}, {"b", second}});
  load(tree, path, *solo_group());
  std::vector<float> got(8);
  std::memcpy(got.data(), storage->data, 32);
  EXPECT_EQ(got, (std::vector<float>{0, 10, 1, 11, 2, 12, 3, 13}));
}

// Random ranges of one storage: refused exactly when two that are not the same have an element in
// common.
TEST(Load, OverlapsAreFoundExactlyWhereTheyAre) {
  std::mt19937 random(5);
  int refused = 0;
  for (int round = 0; round < 2000; ++round) {
    const auto storage = memory(4 * 64);
    std::vector<std::pair<std::int64_t, std::int64_t>> ranges;  // begin, count
    std::vector<Filling> fillings;
    for (int i = 0; i < 4; ++i) {
      ranges.emplace_back(static_cast<std::int64_t>(random() % 48),
                          static_cast<std::int64_t>(random() % 12));
      if (i > 0 && random() % 4 == 0) ranges.back() = ranges.front();
      const auto [begin, count] = ranges.back();
      Tensor tensor = counting({count}, whole({count}), 0, false);
      tensor.pieces[0].storage = storage;
      tensor.pieces[0].storage_offset = begin;
      fillings.push_back({"k" + std::to_string(i), Value(tensor), Value(tensor)});
    }
    bool overlap = false;
    for (const auto& a : ranges) {
      for (const auto& b : ranges) {
        overlap = overlap || (a != b && a.second > 0 && b.second > 0 &&
                              a.first < b.first + b.second && b.first < a.first + a.second);
      }
    }
    bool thrown = false;
    try {
      const Owners owners = owners_of(fillings);
      for (std::size_t i = 0; i < owners.size(); ++i) {
        const std::size_t owner = owners[i][0].filling;
        EXPECT_EQ(ranges[i], ranges[owner]);
      }
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      thrown = true;
    }
    EXPECT_EQ(thrown, overlap) << round;
    refused += thrown ? 1 : 0;
  }
  EXPECT_GT(refused, 200);
  EXPECT_LT(refused, 1900);
}

}  // namespace
}  // namespace tessera
