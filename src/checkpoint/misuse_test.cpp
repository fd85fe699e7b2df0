// Arguments that make no sense end in an Error, not in a crash (issue 15, 7.2).
#include <filesystem>

#include "checkpoint/test_support.h"

namespace tessera {
namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)

Value small_tree() {
  return Value::dict({{"w", counting({4}, whole({4}), 0)}});
}

TEST(Misuse, NumbersOfThreadsAndRanksHaveBounds) {
  const std::string root = temporary_directory();
  const auto group = solo_group();
  Value tree = small_tree();
  save(tree, root + "/c", *group);
  const Checkpoint checkpoint = Checkpoint::open(root + "/c");
  for (const int number : {0, -1, 1 << 30}) {
    const auto refused = [&](const auto& call) {
      EXPECT_EQ(code_of(call), ErrorCode::invalid_argument) << number;
    };
    SaveOptions to;
    to.threads = number;
    refused([&] { save(tree, root + "/d", to, *group); });
    LoadOptions from;
    from.threads = number;
    refused([&] { load(tree, root + "/c", from, *group); });
    refused([&] { (void)checkpoint.load(from); });
    refused([&] { (void)verify(root + "/c", {.threads = number}); });
    refused([&] { (void)verify(checkpoint, {.threads = number}); });
    refused([&] { (void)seal(root + "/c", {.threads = number}); });
    ConvertOptions how;
    how.threads = number;
    refused([&] { convert(root + "/c", root + "/d.safetensors", how); });
    for (const auto kind : {CheckpointKind::dcp, CheckpointKind::olmo_torch_new,
                            CheckpointKind::olmo_legacy, CheckpointKind::olmo_local}) {
      ConvertOptions ranks;
      ranks.to = kind;
      ranks.ranks = number;
      refused([&] { convert(root + "/c", root + "/d", ranks); });
    }
  }
  EXPECT_FALSE(std::filesystem::exists(root + "/d"));
  EXPECT_FALSE(std::filesystem::exists(root + "/d.safetensors"));
}

TEST(Misuse, TreesThatCannotBeWalkedAreRefused) {
  const std::string root = temporary_directory();
  const auto group = solo_group();
  save(small_tree(), root + "/c", *group);
  Value deep(1);
  Value tuples(1);
  for (int i = 0; i < 100'000; ++i) {
    deep = Value::dict({{"a", deep}});
    tuples = Value::tuple({tuples});
  }
  Value with_tuples = Value::dict({{"a", tuples}});
  Value cyclic = small_tree();
  cyclic.set_item("self", Value::list({cyclic}));
  for (Value* tree : {&deep, &with_tuples, &cyclic}) {
    const ErrorCode code = tree == &cyclic ? ErrorCode::invalid_argument : ErrorCode::limit;
    EXPECT_EQ(code_of([&] { save(*tree, root + "/d", *group); }), code);
    EXPECT_EQ(code_of([&] { load(*tree, root + "/c", *group); }), code);
  }
  EXPECT_FALSE(std::filesystem::exists(root + "/d"));
  cyclic.set_item("self", 0);  // or it would never be freed
}

// One tensor of `dtype` with room for `count` elements of at most 8 bytes.
Value tree_of(DType dtype, std::int64_t count) {
  Tensor tensor;
  tensor.dtype = dtype;
  tensor.shape = {count};
  tensor.pieces.push_back({whole({count}), memory(static_cast<std::size_t>(count) * 8), 0, {}, -1});
  return Value::dict({{"w", std::move(tensor)}});
}

// Issue 15, 7.3.
TEST(Misuse, IntegersWrapOnlyWhenAskedForByName) {
  const std::string directory = temporary_directory() + "/c";
  const auto group = solo_group();
  Value saved = tree_of(DType::int32, 1);
  const std::int32_t number = 300;
  std::memcpy(saved.at("w").as_tensor().pieces[0].storage->data, &number, sizeof number);
  save(saved, directory, *group);
  Value narrow = tree_of(DType::int8, 1);
  const Error error = error_of([&] { load(narrow, directory, *group); });
  EXPECT_EQ(error.code(), ErrorCode::mismatch);
  EXPECT_NE(error.message().find("allow_wrap"), std::string::npos);
  LoadOptions options;
  options.allow_wrap = true;
  load(narrow, directory, options, *group);
  const auto byte_of = [](const Value& tree) {
    return std::to_integer<int>(*tree.at("w").as_tensor().pieces[0].storage->data);
  };
  EXPECT_EQ(byte_of(narrow), 44);
  Value wide = tree_of(DType::int64, 1);
  load(wide, directory, *group);
  EXPECT_EQ(byte_of(wide), 44);  // of 300
}

TEST(Misuse, WeightsBecomeIntegersOnlyWhenAskedForByName) {
  const std::string root = temporary_directory();
  save(small_tree(), root + "/c", *solo_group());
  ConvertOptions options;
  const auto run = [&] { convert(root + "/c", root + "/d.safetensors", options); };
  for (const DType dtype : {DType::int8, DType::uint64, DType::bool8}) {
    options.dtype = dtype;
    EXPECT_EQ(code_of(run), ErrorCode::invalid_argument);
  }
  for (const DType dtype : {DType::float8_e4m3fn, DType::complex64}) {
    options.dtype = dtype;
    EXPECT_EQ(code_of(run), ErrorCode::unsupported);
  }
  EXPECT_FALSE(std::filesystem::exists(root + "/d.safetensors"));
  options.dtype = DType::int8;
  options.allow_wrap = true;
  run();
  EXPECT_EQ(Checkpoint::open(root + "/d.safetensors").find("w")->value.as_tensor().dtype,
            DType::int8);
}

// Issue 15, 7.5.
TEST(Misuse, APairWithoutAConversionIsUnsupported) {
  const std::string directory = temporary_directory() + "/c";
  const auto group = solo_group();
  save(tree_of(DType::complex64, 2), directory, *group);
  Value tree = tree_of(DType::float32, 2);
  const Error error = error_of([&] { load(tree, directory, *group); });
  EXPECT_EQ(error.code(), ErrorCode::unsupported);
  EXPECT_EQ(error.key(), "w");
  EXPECT_EQ(error.path(), directory);
}

}  // namespace
}  // namespace tessera
