// Trainers whose writer processes keep their last snapshot are killed, and others start from it.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/testing.h"
#include "checkpoint/background/testing.h"
#include "comm/confer.h"
#include "comm/testing.h"
#include "conformance/temporary_directory.h"
#include "five_kinds.h"
#include "io/source.h"
#include "multirank/forked_ranks.h"
#include "socket_wire.h"
#include "storage/arena/arenas.h"
#include "tessera/checkpoint_writer.h"
#include "tessera/run_directory.h"
#include "tessera/verify.h"

namespace tessera {
namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)
using namespace std::chrono_literals;
using ::testing::IsEmpty;
using ::testing::SizeIs;
namespace fs = std::filesystem;

// The directory in which processes of this test say what they keep.
class Arenas : public ::testing::Test {
 protected:
  Arenas() { ::setenv("TESSERA_ARENA_DIR", (directory_.path() + "/arenas").c_str(), 1); }
  ~Arenas() override {
    forget(kept_parts());
    while (has_processes()) std::this_thread::sleep_for(10ms);
    ::unsetenv("TESSERA_ARENA_DIR");
  }
  [[nodiscard]] std::string run() const { return directory_.path() + "/run"; }
  [[nodiscard]] std::string place(int step) const { return run() + "/step" + std::to_string(step); }

  static WriterOptions keeping(std::chrono::milliseconds keep = 60s) {
    WriterOptions options = prompt();
    options.process = true;
    options.program = TESSERA_COMMAND;
    options.silence = 2s;
    options.keep = keep;
    return options;
  }

  // Trainers that save these steps and are killed when all are decided.
  void train_and_die(int ranks, const std::vector<int>& steps, WriterOptions options = keeping()) {
    auto* decided = testing::shared_by_processes<std::atomic<int>>();
    auto trainers = testing::fork_group(ranks, {.silence = 5s}, 30s, [&](Group& group, int rank) {
      CheckpointWriter writer(owned(group), options);
      for (const int step : steps)
        writer.save(testing::training_state(rank, ranks, step), place(step)).result();
      ++*decided;
      ::pause();
      return 0;
    });
    while (*decided < ranks) std::this_thread::sleep_for(5ms);
    for (const auto& trainer : trainers) ::kill(trainer.process, SIGKILL);
    for (const auto& trainer : trainers) ::waitpid(trainer.process, nullptr, 0);
  }

 private:
  // `tessera writer` of this test: those that have the directory in their environment.
  [[nodiscard]] bool has_processes() const { return !kept_parts().empty(); }

  const TemporaryDirectory directory_;
};

TEST_F(Arenas, WhatDeadTrainersHadStagedIsLoadedFromMemory) {
  for (const int ranks : {1, 3}) {
    train_and_die(ranks, {1, 2});
    const auto kept = kept_parts();
    ASSERT_THAT(kept, SizeIs(ranks));
    EXPECT_EQ(kept.front().place, place(2));
    const auto disk = Checkpoint::open(place(2));
    const auto arena = Checkpoint::open("arena://" + place(2));
    EXPECT_EQ(arena.kind, CheckpointKind::arena);
    EXPECT_EQ(arena.world_size, ranks);
    EXPECT_TRUE(diff(disk, arena).empty());
    EXPECT_TRUE(diff(arena, disk).empty());
    for (const int world : {1, 2, 4}) {
      run_ranks(world, [&](Group& group) {
        Value state = testing::training_state(group.rank(), world, 0);
        Value same = testing::training_state(group.rank(), world, 0);
        load(state, "arena://" + place(2), group);
        load(same, place(2), group);
        EXPECT_TRUE(state == same);
      });
    }
    EXPECT_EQ(code_of([&] { (void)Checkpoint::open("arena://" + place(1)); }),
              ErrorCode::not_found);
    forget(kept);
    while (!kept_parts().empty()) std::this_thread::sleep_for(5ms);
    fs::remove_all(run());
  }
}

// The newer one of memory and disk, and of one step that in memory.
TEST_F(Arenas, TheLatestIsTheNewest) {
  train_and_die(2, {1, 2});
  const auto latest = [&] {
    std::string found;
    run_ranks(3, [&](Group& group) {
      const auto one = latest_checkpoint(run(), {}, group);
      if (group.rank() == 0) found = one.found->where.path;
    });
    EXPECT_EQ(latest_checkpoint(run()).found->where.path, found);
    return found;
  };
  EXPECT_EQ(latest(), "arena://" + place(2));
  save(testing::training_state(0, 1, 3), place(3));
  EXPECT_EQ(latest(), place(3));
  fs::remove_all(place(3));
  fs::remove_all(place(2));
  EXPECT_EQ(latest(), "arena://" + place(2));
  forget(kept_parts());
  while (!kept_parts().empty()) std::this_thread::sleep_for(5ms);
  EXPECT_EQ(latest(), place(1));
}

// Until a new training has staged, or its time is over; one that ends well leaves nothing.
TEST_F(Arenas, SnapshotsEnd) {
  train_and_die(1, {1});
  EXPECT_THAT(kept_parts(), SizeIs(1));
  {
    CheckpointWriter writer(keeping());
    writer.save(testing::training_state(0, 1, 3), place(3)).result();
    const auto kept = kept_parts();
    ASSERT_THAT(kept, SizeIs(1));
    EXPECT_EQ(kept.front().place, place(3));
  }
  EXPECT_THAT(kept_parts(), IsEmpty());
  train_and_die(1, {4});
  ::kill(kept_parts().at(0).process.pid, SIGTERM);
  while (!kept_parts().empty()) std::this_thread::sleep_for(5ms);
  train_and_die(1, {5}, keeping(300ms));
  while (!kept_parts().empty()) std::this_thread::sleep_for(5ms);
  train_and_die(1, {6}, keeping(0ms));
  EXPECT_THAT(kept_parts(), IsEmpty());
}

// A trainer that died while it staged the next one has written over the last.
TEST_F(Arenas, ATornSnapshotIsRefused) {
  train_and_die(1, {1});
  const auto kept = kept_parts();
  ASSERT_THAT(kept, SizeIs(1));
  const std::string memory = "/proc/" + std::to_string(kept.front().process.pid) + "/fd/" +
                             std::to_string(kept.front().objects.at(1).fd);
  const Fd arena(::open(memory.c_str(), O_RDWR | O_CLOEXEC));
  ASSERT_TRUE(arena);
  char changed = 'x';
  ASSERT_EQ(::pwrite(arena.get(), &changed, 1, 40), 1);
  EXPECT_EQ(code_of([&] { (void)Checkpoint::open("arena://" + place(1)).load(); }),
            ErrorCode::corrupt);
  EXPECT_EQ(latest_checkpoint(run()).found->where.path, place(1));  // on the disk
}

TEST_F(Arenas, PartsOfSomeRanksAreNoSnapshot) {
  train_and_die(2, {1});
  auto kept = kept_parts();
  ASSERT_THAT(kept, SizeIs(2));
  kept.pop_back();
  forget(kept);
  while (kept_parts().size() > 1) std::this_thread::sleep_for(5ms);
  EXPECT_EQ(code_of([&] { (void)Checkpoint::open("arena://" + place(1)); }), ErrorCode::incomplete);
}

// Whose processes say what they keep there, others decide.
TEST_F(Arenas, ADirectoryOfOthersIsUnsafe) {
  const TemporaryDirectory open;
  fs::permissions(open.path(), fs::perms::all);
  ::setenv("TESSERA_ARENA_DIR", open.path().c_str(), 1);
  EXPECT_EQ(code_of([] { (void)kept_parts(); }), ErrorCode::unsafe);
  save(Value::dict({{"step", 1}}), place(1));
  const Warnings warnings;
  EXPECT_EQ(latest_checkpoint(run()).found->step, 1);
  EXPECT_THAT(warnings.texts(), SizeIs(1));
  fs::permissions(open.path(), fs::perms::owner_all);
  EXPECT_THAT(kept_parts(), IsEmpty());
  ::setenv("TESSERA_ARENA_DIR", (open.path() + "/none").c_str(), 1);
  EXPECT_THAT(kept_parts(), IsEmpty());
  EXPECT_FALSE(fs::exists(open.path() + "/none"));  // who looks makes nothing
}

// As files on a disk it is the same kind; no byte of them may change.
TEST_F(Arenas, FilesOfASnapshotWhoseBytesChangeAreRefused) {
  train_and_die(2, {1});
  const auto store = open_store("arena://" + place(1));
  const auto copy = memory_store();
  for (const auto& object : store->list())
    put(*copy, object.name, read_all(*store->open(object.name), 1U << 30U), IfExists::fail);
  EXPECT_TRUE(diff(Checkpoint::open(Location(copy)), Checkpoint::open(place(1))).empty());
  for (const auto& object : copy->list()) {
    const Bytes good = read_all(*copy->open(object.name), 1U << 30U);
    const std::size_t step = std::max<std::size_t>(1, good.size() / 97);
    for (std::size_t at = 0; at < good.size(); at += step) {
      Bytes bad = good;
      bad[at] ^= std::byte{0x20};
      put(*copy, object.name, bad, IfExists::replace);
      const auto failure = failure_of([&] { (void)Checkpoint::open(Location(copy)).load(); });
      ASSERT_TRUE(failure) << object.name << " at " << at;
      EXPECT_EQ(failure->code(), ErrorCode::corrupt) << failure->what();
      bad.resize(at);
      put(*copy, object.name, bad, IfExists::replace);
      EXPECT_TRUE(failure_of([&] { (void)Checkpoint::open(Location(copy)).load(); }));
    }
    put(*copy, object.name, good, IfExists::replace);
  }
}

// What somebody has put where a process says what it keeps.
TEST_F(Arenas, NoticesThatNobodyWroteAreNone) {
  train_and_die(1, {1});
  const std::string directory = std::getenv("TESSERA_ARENA_DIR");
  const std::string name = fs::directory_iterator(directory)->path().filename();
  std::ifstream file(directory + "/" + name);
  const std::string good{std::istreambuf_iterator<char>(file), {}};
  int number = 0;
  const auto put = [&](const std::string& text, std::string as) {
    if (as.empty()) as = "0123456789ab-" + std::to_string(++number);
    std::ofstream(directory + "/" + as) << text;
  };
  put("", "");
  put("nonsense", "");
  put(good, "");  // another one's name
  for (std::size_t cut = 1; cut < good.size(); cut += 7) put(good.substr(0, cut), "");
  EXPECT_THAT(kept_parts(), SizeIs(1));
  // A descriptor that means something else now.
  std::string other = good;
  const std::size_t inode = other.find_last_of(' ');
  other.replace(inode + 1, std::string::npos, "1\n");
  put(other, name);
  EXPECT_EQ(code_of([&] { (void)Checkpoint::open("arena://" + place(1)); }), ErrorCode::not_found);
  for (const auto& entry : fs::directory_iterator(directory)) fs::remove(entry);
}

}  // namespace
}  // namespace tessera
