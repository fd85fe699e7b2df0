// Reading from an open checkpoint: names, slices, casts, many at once.
#include <ctime>

#include <algorithm>
#include <array>
#include <atomic>
#include <limits>
#include <numeric>
#include <thread>

#include "base/numbers.h"
#include "checkpoint/test_support.h"
#include "tessera/tensor_view.h"

namespace tessera {
namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)

const Shape kShape{6, 40};

// Two ranks' halves; element i of "model.w" is i, of "model.v" 1000 + i.
std::string saved() {
  const std::string directory = temporary_directory() + "/c";
  run_ranks(2, [&](Group& group) {
    const auto half = [&](float first) {
      return Value(counting(kShape, chunk(kShape, group.rank(), 2), first));
    };
    const Value model = Value::dict({{"w", half(0)}, {"v", half(1000)}});
    save(Value::dict({{"model", model}, {"step", 7}}), directory, group);
  });
  return directory;
}

// The same checkpoint as every kind that is written without options of its own.
std::vector<std::string> of_all_kinds() {
  std::vector<std::string> paths{saved()};
  const std::string root = temporary_directory();
  for (const auto& [name, kind] : {std::pair("/a.pt", CheckpointKind::torch_file),
                                   {"/a.safetensors", CheckpointKind::safetensors},
                                   {"/again", CheckpointKind::dcp}}) {
    ConvertOptions how;
    how.to = kind;
    how.ranks = kind == CheckpointKind::dcp ? 3 : 1;
    convert(paths[0], root + name, how);
    paths.push_back(root + name);
  }
  return paths;
}

TEST(Read, NamesAndShapesComeFromMetadataThatIsReadOnce) {
  for (const std::string& path : of_all_kinds()) {
    const Checkpoint checkpoint = Checkpoint::open(path);
    EXPECT_EQ(checkpoint.names(), (std::vector<std::string>{"model.v", "model.w"})) << path;
    EXPECT_EQ(checkpoint.names("model.w*"), std::vector<std::string>{"model.w"});
    EXPECT_TRUE(checkpoint.names("x*").empty());
    EXPECT_EQ(checkpoint.tensor("model.w").shape, kShape);
    EXPECT_EQ(checkpoint.tensor("model.w").dtype, DType::float32);
    EXPECT_EQ(code_of([&] { (void)checkpoint.tensor("model"); }), ErrorCode::not_found);
    EXPECT_EQ(code_of([&] { (void)checkpoint.tensor("step"); }), ErrorCode::mismatch);
    EXPECT_EQ(checkpoint.find("step")->value.as_int(), 7);
    EXPECT_EQ(checkpoint.find("absent"), nullptr);
  }
}

TEST(Read, SlicesOfEveryKindIntoMemoryAtStrides) {
  for (const std::string& path : of_all_kinds()) {
    const Checkpoint checkpoint = Checkpoint::open(path);
    // Rows 2 and 3 lie on both sides of the border between the ranks that saved; transposed.
    std::vector<float> columns(60, -1);
    const Box box{{2, 10}, {2, 20}};
    const IoReport report = checkpoint.read(
        "model.v", box, TensorView::of(columns.data(), DType::float32, {2, 20}, {1, 3}));
    EXPECT_EQ(report.bytes_needed, 160U);
    for (std::size_t i = 0; i < 20; ++i) {
      EXPECT_EQ(columns[3 * i], 1090 + static_cast<float>(i)) << path;
      EXPECT_EQ(columns[3 * i + 1], 1130 + static_cast<float>(i)) << path;
      EXPECT_EQ(columns[3 * i + 2], -1) << path;
    }
    std::vector<double> flat(100);
    checkpoint.read("model.w", FlatRange{100, 200},
                    TensorView::of(flat.data(), DType::float64, {100}));
    EXPECT_EQ(flat.front(), 100);
    EXPECT_EQ(flat.back(), 199);
    std::vector<BFloat16> whole(240);
    checkpoint.read("model.w", TensorView::of(whole.data(), DType::bfloat16, kShape));
    EXPECT_EQ(static_cast<float>(whole[239]), 239);
  }
}

TEST(Read, ManyAtOnceWithFewThreadsAndLittleMemory) {
  const Checkpoint checkpoint = Checkpoint::open(saved());
  std::vector<float> rows(12 * 40);
  std::vector<ReadRequest> requests;
  for (std::int64_t r = 0; r < 12; ++r) {
    Box row = whole(kShape);
    row.offsets[0] = r % 6;
    row.sizes[0] = 1;
    requests.push_back(
        {.name = r < 6 ? "model.w" : "model.v",
         .to = TensorView::of(&rows[static_cast<std::size_t>(r) * 40], DType::float32, {1, 40}),
         .slice = row});
  }
  std::atomic<std::uint64_t> done = 0;
  ReadOptions options;
  options.threads = 3;
  options.memory = 1 << 16;
  options.progress = [&](const Progress& progress) { done = progress.done; };
  const IoReport report = checkpoint.read_many(requests, options);
  EXPECT_EQ(report.bytes_needed, rows.size() * 4);
  EXPECT_EQ(done, rows.size() * 4);
  for (std::size_t i = 0; i < 240; ++i) {
    EXPECT_EQ(rows[i], static_cast<float>(i));
    EXPECT_EQ(rows[240 + i], static_cast<float>(1000 + i));
  }
  EXPECT_EQ(checkpoint.read_many({}).bytes_needed, 0U);
}

TEST(Read, WhatCannotBeReadIsRefusedBeforeAnythingIsWritten) {
  const Checkpoint checkpoint = Checkpoint::open(saved());
  std::vector<float> memory(240, -1);
  const auto view = TensorView::of(memory.data(), DType::float32, kShape);
  const auto refused = [&](const std::vector<ReadRequest>& requests, ErrorCode code,
                           const ReadOptions& options = {}) {
    EXPECT_EQ(code_of([&] { checkpoint.read_many(requests, options); }), code);
    EXPECT_EQ(std::count(memory.begin(), memory.end(), -1), 240);
  };
  const ReadRequest good{"model.w", view, {}};
  refused({good, {"absent", view, {}}}, ErrorCode::not_found);
  refused({good, {"step", view, {}}}, ErrorCode::mismatch);
  const auto row = TensorView::of(memory.data(), DType::float32, {40});
  refused({{"model.w", row, {}}}, ErrorCode::mismatch);
  refused({{"model.w", row, FlatRange{0, 39}}}, ErrorCode::mismatch);
  refused({{"model.w", row, FlatRange{220, 260}}}, ErrorCode::invalid_argument);
  refused({{"model.w", view, Box{{1, 0}, kShape}}}, ErrorCode::invalid_argument);
  refused({{"model.w", view, Box{{0}, {6}}}}, ErrorCode::mismatch);
  refused({good, {"model.v", TensorView::of(&memory[200], DType::float32, {40}), FlatRange{0, 40}}},
          ErrorCode::invalid_argument);
  const auto one_place = TensorView::of(memory.data(), DType::float32, kShape, {0, 1});
  refused({{"model.w", one_place, {}}}, ErrorCode::invalid_argument);
  const auto integers = TensorView::of(memory.data(), DType::int8, kShape);
  refused({{"model.w", integers, {}}}, ErrorCode::mismatch);
  const auto narrow = TensorView::of(memory.data(), DType::float16, kShape);
  refused({{"model.w", narrow, {}}}, ErrorCode::mismatch, {.allow_cast = false});
  refused({good}, ErrorCode::invalid_argument, {.threads = 0});
  std::stop_source stop;
  stop.request_stop();
  refused({good}, ErrorCode::cancelled, {.stop = stop.get_token()});
}

TEST(Read, StopsInTheMiddle) {
  const Shape large{64, 1 << 16};
  const std::string path = temporary_directory() + "/a.safetensors";
  save(Value::dict({{"w", counting(large, whole(large), 0)}}), path);
  const Checkpoint checkpoint = Checkpoint::open(path);
  std::vector<float> memory(static_cast<std::size_t>(numel(large)), -1);
  std::stop_source stop;
  ReadOptions options{.stop = stop.get_token()};
  options.progress = [&](const Progress&) { stop.request_stop(); };
  const auto read = [&] {
    checkpoint.read("w", TensorView::of(memory.data(), DType::float32, large), options);
  };
  EXPECT_EQ(code_of(read), ErrorCode::cancelled);
  EXPECT_EQ(memory.back(), -1);
}

TEST(Read, FromSeveralThreadsAtOnce) {
  const Checkpoint checkpoint = Checkpoint::open(saved());
  std::vector<std::vector<float>> found(4, std::vector<float>(240));
  std::vector<std::jthread> threads;
  for (auto& memory : found) {
    threads.emplace_back([&checkpoint, &memory] {
      for (int i = 0; i < 20; ++i)
        checkpoint.read("model.w", TensorView::of(memory.data(), DType::float32, kShape));
    });
  }
  threads.clear();
  for (const auto& memory : found) {
    for (std::size_t i = 0; i < 240; ++i) EXPECT_EQ(memory[i], static_cast<float>(i));
  }
}

// CPU time, in clocks, of a thousand reads of a file that holds so many tensors: the least of some
// tries, as other programs run beside.
std::clock_t clocks_of_reads(int tensors) {
  constexpr int kReads = 1'000;
  const auto store = memory_store();
  Value tree = Value::dict();
  const std::array<float, 1> one{1};
  for (int i = 0; i < tensors; ++i) {
    tree["layers." + std::to_string(i) + ".weight"] =
        ConstTensorView::of(one.data(), DType::float32, {1}).tensor();
  }
  save(tree, {store, "many.safetensors"});
  const Checkpoint checkpoint = Checkpoint::open({store, "many.safetensors"});
  EXPECT_EQ(checkpoint.leaves.size(), tensors);
  std::clock_t least = std::numeric_limits<std::clock_t>::max();
  for (int attempt = 0; attempt < 5; ++attempt) {
    const std::clock_t begin = std::clock();
    for (int i = 0; i < kReads; ++i) {
      float found = 0;
      checkpoint.read("layers." + std::to_string(i * 97 % tensors) + ".weight",
                      TensorView::of(&found, DType::float32, {1}));
      EXPECT_EQ(found, 1);
    }
    least = std::min(least, std::clock() - begin);
  }
  return least;
}

// A loader asks for one tensor after the other: what it pays for that must not depend on how many
// there are. A search would make a thousand times as many cost a thousand times as much.
TEST(Read, ANameIsFoundAmongManyAtOnce) {
  const std::clock_t few = clocks_of_reads(100);
  const std::clock_t many = clocks_of_reads(100'000);
  EXPECT_LE(many, 50 * few) << few;
}

}  // namespace
}  // namespace tessera
