// Progress of long work, and what is left when its caller ends it.
#include <atomic>
#include <chrono>
#include <filesystem>
#include <thread>

#include "checkpoint/test_support.h"
#include "tessera/verify.h"

namespace tessera {
namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)

constexpr std::int64_t kRows = 40;
const Shape kShape{kRows, 1 << 18};                           // rows of 1 MiB
constexpr std::uint64_t kBytes = std::uint64_t{kRows} << 20;  // of the whole tensor

// Two ranks' halves of one tensor.
Value half(int rank, int ranks) {
  return Value::dict({{"w", counting(kShape, chunk(kShape, rank, ranks), 0, false)}});
}

// What a hook heard.
struct Heard {
  std::atomic<int> calls = 0;
  std::atomic<std::uint64_t> last = 0;
  std::atomic<bool> in_order = true;

  void note(const Progress& progress) {
    in_order = in_order && last <= progress.done && progress.done <= progress.total;
    ++calls;
    last = progress.done;
  }
};

TEST(Progress, OfASaveAndALoadIsEachRanksOwn) {
  const std::string directory = temporary_directory() + "/c";
  std::vector<Heard> saved(2);
  std::vector<Heard> loaded(2);
  run_ranks(2, [&](Group& group) {
    Heard& by_save = saved[static_cast<std::size_t>(group.rank())];
    Heard& by_load = loaded[static_cast<std::size_t>(group.rank())];
    SaveOptions to;
    to.progress = [&](const Progress& progress) { by_save.note(progress); };
    Value tree = half(group.rank(), 2);
    save(tree, directory, to, group);
    LoadOptions from;
    from.progress = [&](const Progress& progress) { by_load.note(progress); };
    load(tree, directory, from, group);
  });
  for (const auto* heard : {&saved[0], &saved[1], &loaded[0], &loaded[1]}) {
    EXPECT_GE(heard->calls, 2);  // a window, and the end
    EXPECT_EQ(heard->last, kBytes / 2);
    EXPECT_TRUE(heard->in_order);
  }
  Heard all;
  LoadOptions from;
  from.progress = [&](const Progress& progress) { all.note(progress); };
  (void)Checkpoint::open(directory).load(from);
  EXPECT_EQ(all.last, kBytes);
}

// Rank 1 requests an end in its first window; rank 0 has slow windows and never does.
struct OneRankStops {
  explicit OneRankStops(int of) : rank(of) {
    hook = [this](const Progress&) {
      if (rank == 1) source.request_stop();
      ++calls;
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    };
  }
  int rank;
  std::stop_source source;
  ProgressHook hook;
  std::atomic<int> calls = 0;
};

TEST(Stop, EndsASaveOfAllRanksAndCommitsNothing) {
  const std::string directory = temporary_directory() + "/c";
  run_ranks(2, [&](Group& group) {
    OneRankStops stops(group.rank());
    SaveOptions options;
    options.threads = 1;
    options.progress = stops.hook;
    options.stop = stops.source.get_token();
    const Value tree = half(group.rank(), 2);
    EXPECT_EQ(code_of([&] { save(tree, directory, options, group); }), ErrorCode::cancelled);
    EXPECT_LT(stops.calls, kRows / 4);
  });
  EXPECT_TRUE(posix_store(directory)->list().empty());
}

TEST(Stop, LeavesTheOlderCheckpointWhole) {
  const std::string directory = temporary_directory() + "/c";
  const auto group = solo_group();
  save(Value::dict({{"w", counting({3}, whole({3}), 7)}}), directory, *group);
  const auto before = posix_store(directory)->list().size();
  OneRankStops stops(1);
  SaveOptions options;
  options.overwrite = true;
  options.progress = stops.hook;
  options.stop = stops.source.get_token();
  EXPECT_EQ(code_of([&] { save(half(0, 1), directory, options, *group); }), ErrorCode::cancelled);
  EXPECT_EQ(posix_store(directory)->list().size(), before);
  EXPECT_EQ(floats(Checkpoint::open(directory).load().at("w").as_tensor()),
            (std::vector<float>{7, 8, 9}));
}

TEST(Stop, EndsALoadOfAllRanks) {
  const std::string directory = temporary_directory() + "/c";
  save(half(0, 1), directory, *solo_group());
  run_ranks(2, [&](Group& group) {
    OneRankStops stops(group.rank());
    LoadOptions options;
    options.threads = 1;
    options.progress = stops.hook;
    options.stop = stops.source.get_token();
    Value tree = half(group.rank(), 2);
    EXPECT_EQ(code_of([&] { load(tree, directory, options, group); }), ErrorCode::cancelled);
    EXPECT_LT(stops.calls, kRows / 4);
  });
  OneRankStops stops(1);
  LoadOptions options;
  options.progress = stops.hook;
  options.stop = stops.source.get_token();
  const Checkpoint checkpoint = Checkpoint::open(directory);
  EXPECT_EQ(code_of([&] { (void)checkpoint.load(options); }), ErrorCode::cancelled);
}

TEST(Stop, BeforeTheBeginNothingIsDone) {
  const std::string root = temporary_directory();
  std::stop_source source;
  source.request_stop();
  SaveOptions to;
  to.stop = source.get_token();
  EXPECT_EQ(code_of([&] { save(half(0, 1), root + "/c", to, *solo_group()); }),
            ErrorCode::cancelled);
  EXPECT_FALSE(std::filesystem::exists(root + "/c"));
}

TEST(Stop, EndsAConversionOfEveryKind) {
  const std::string root = temporary_directory();
  save(half(0, 1), root + "/c", *solo_group());
  const std::map<CheckpointKind, std::string> targets = {
      {CheckpointKind::safetensors, "/t.safetensors"},
      {CheckpointKind::torch_file, "/t.pt"},
      {CheckpointKind::dcp, "/t"},
  };
  for (const auto& entry : targets) {
    const auto kind = entry.first;
    const std::string target = entry.second;
    for (const bool resume : {false, true}) {
      OneRankStops stops(1);
      ConvertOptions options;
      options.to = kind;
      options.resume = resume;
      options.progress = stops.hook;
      options.stop = stops.source.get_token();
      const auto run = [&] { convert(root + "/c", root + target, options); };
      EXPECT_EQ(code_of(run), ErrorCode::cancelled) << target;
      EXPECT_LT(stops.calls, kRows / 4) << target;
      const std::string marker = kind == CheckpointKind::dcp ? target + "/.metadata" : target;
      EXPECT_FALSE(std::filesystem::exists(root + marker)) << marker;
    }
    ConvertOptions again;
    again.to = kind;
    again.resume = true;
    EXPECT_EQ(convert(root + "/c", root + target, again).tensors, 1U) << target;
  }
}

TEST(Stop, EndsAnOpenAndAScan) {
  const std::string directory = temporary_directory() + "/c";
  save(Value::dict({{"n", 1}}), directory);
  std::stop_source source;
  EXPECT_EQ(Checkpoint::open(directory, {.stop = source.get_token()}).leaves.size(), 1U);
  EXPECT_TRUE(scan(directory, {.allow = {}, .stop = source.get_token()}).problems.empty());
  source.request_stop();
  EXPECT_EQ(code_of([&] { (void)Checkpoint::open(directory, {.stop = source.get_token()}); }),
            ErrorCode::cancelled);
  EXPECT_EQ(code_of([&] { (void)scan(directory, {.allow = {}, .stop = source.get_token()}); }),
            ErrorCode::cancelled);
}

}  // namespace
}  // namespace tessera
