// Trainers whose writer processes keep their last snapshot are killed, and others start from it.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/stat.h>
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
    testing::kill_all(trainers);
    const auto has_noted = [](const KeptPart& part) { return part.trainer == kEnded; };
    while (!std::ranges::all_of(kept_parts(), has_noted)) std::this_thread::sleep_for(5ms);
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
  EXPECT_THAT(latest(), ::testing::StartsWith("arena://" + place(2) + "#"));
  save(testing::training_state(0, 1, 3), place(3));
  EXPECT_EQ(latest(), place(3));
  fs::remove_all(place(3));
  fs::remove_all(place(2));
  EXPECT_THAT(latest(), ::testing::StartsWith("arena://" + place(2) + "#"));
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
  const auto latest = latest_checkpoint(run(), {.read_data = true});
  EXPECT_EQ(latest.found->where.path, place(1));  // on the disk
  EXPECT_THAT(latest.warnings, SizeIs(1));
  // Before it writes, a trainer raises the count: nobody has to read the bytes then.
  EXPECT_THAT(latest_checkpoint(run()).found->where.path, ::testing::StartsWith("arena://"));
  ASSERT_TRUE(begin_overwriting(arena, kept.front().objects.at(1).bytes));
  EXPECT_EQ(latest_checkpoint(run()).found->where.path, place(1));
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

// A training goes on while ranks of other numbers load from the memory of its processes.
TEST_F(Arenas, AReaderBesideATrainingSeesOneSaveOrTheNext) {
  const testing::NamedShapes shapes{{"a.w", {701, 400}}, {"b.bias", {13}}};
  auto* saves = testing::shared_by_processes<std::atomic<int>>();
  auto* is_over = testing::shared_by_processes<std::atomic<bool>>();
  auto trainers = testing::fork_group(2, {.silence = 10s}, 60s, [&](Group& group, int rank) {
    CheckpointWriter writer(owned(group), keeping());
    for (int step = 1; !*is_over; ++step) {
      const std::string at = place(step);
      writer.save(testing::training_state(rank, 2, step, shapes), at).result();
      agree(group, "a step", [&] {
        if (rank == 0) fs::remove_all(at);
      });
      if (rank == 0) *saves = step;
    }
    return 0;
  });
  while (*saves < 1) std::this_thread::sleep_for(2ms);
  int last = 0, seen = 0;
  for (const int world : {1, 3, 2, 1, 4, 2, 3, 1}) {
    const int before = *saves;
    std::atomic<int> number = 0;
    run_ranks(world, [&](Group& group) {
      Value state = testing::training_state(group.rank(), world, 0, shapes);
      load(state, "arena://" + run(), group);
      if (group.rank() == 0) number = testing::number_of(state);
      EXPECT_TRUE(state ==
                  testing::training_state(group.rank(), world, testing::number_of(state), shapes));
      agree(group, "looking", [] {});
      EXPECT_EQ(testing::number_of(state), number);
    });
    EXPECT_GE(number, std::max(last, before - 1));
    seen += number > last ? 1 : 0;
    last = number;
    while (*saves <= number) std::this_thread::sleep_for(2ms);
  }
  // One that is open stays what it is, however many saves come.
  const auto held = Checkpoint::open("arena://" + run());
  const int now = *saves;
  while (*saves < now + 4) std::this_thread::sleep_for(2ms);
  const Value state = held.load();
  EXPECT_TRUE(
      testing::is_filled_with(state.at("model").at("a.w").as_tensor(), testing::number_of(state)));
  EXPECT_LT(testing::number_of(state), *saves);
  EXPECT_GT(seen, 1);
  *is_over = true;
  for (const auto& trainer : trainers) ::waitpid(trainer.process, nullptr, 0);
}

// Whoever starts again does not wait for the disk.
TEST_F(Arenas, WhatIsNotOnTheDiskYetIsTheLatest) {
  WriterOptions options = keeping();
  options.rate = 1;  // the process that writes takes hours
  auto* staged = testing::shared_by_processes<std::atomic<bool>>();
  auto trainers = testing::fork_group(1, {}, 30s, [&](Group& group, int rank) {
    CheckpointWriter writer(owned(group), options);
    const auto pending = writer.save(testing::training_state(rank, 1, 7), place(7));
    while (kept_parts().empty()) std::this_thread::sleep_for(2ms);
    *staged = true;
    ::pause();
    return 0;
  });
  while (!*staged) std::this_thread::sleep_for(2ms);
  ::kill(trainers.front().process, SIGKILL);
  ::waitpid(trainers.front().process, nullptr, 0);
  EXPECT_FALSE(testing::is_checkpoint_at(place(7)));
  const auto latest = latest_checkpoint(run());
  ASSERT_TRUE(latest.found);
  EXPECT_EQ(latest.found->step, 7);
  EXPECT_TRUE(Checkpoint::open(latest.found->where).load() == testing::training_state(0, 1, 7));
  const auto kept = kept_parts();
  ASSERT_THAT(kept, SizeIs(1));
  ::kill(kept.front().process.pid, SIGKILL);
  while (!kept_parts().empty()) std::this_thread::sleep_for(5ms);
}

// A run that goes on from an earlier step has left what was kept of later ones.
TEST_F(Arenas, WhatTheRunHasLeftIsNotTheLatest) {
  train_and_die(1, {1, 2});
  go_on_from(run(), 1);
  EXPECT_EQ(latest_checkpoint(run()).found->where.path, place(1));
  while (!kept_parts().empty()) std::this_thread::sleep_for(5ms);
}

// All that is stored may be damaged.
TEST_F(Arenas, ASnapshotMakesUpForADamagedDisk) {
  train_and_die(1, {1});
  fs::resize_file(place(1) + "/.metadata", 10);
  const auto latest = latest_checkpoint(run());
  ASSERT_TRUE(latest.found);
  EXPECT_THAT(latest.found->where.path, ::testing::StartsWith("arena://" + place(1)));
  EXPECT_THAT(latest.warnings, SizeIs(1));
}

// The same place by other names.
TEST_F(Arenas, APlaceIsThatOfItsPath) {
  fs::create_directories(run());
  const std::string link = run() + "-link";
  fs::create_directory_symlink(run(), link);
  WriterOptions options = keeping();
  CheckpointWriter writer(options);
  const Value empty = Value::dict({{"step", 3}, {"nothing", Value::list()}});
  writer.save(empty, link + "/../run/step3/").result();
  for (const std::string& name : {run(), run() + "/", link, link + "/step3", place(3) + "/."})
    EXPECT_TRUE(Checkpoint::open("arena://" + name).load() == empty) << name;
  EXPECT_EQ(code_of([&] { (void)Checkpoint::open("arena://" + run() + "/step"); }),
            ErrorCode::not_found);
}

// One that holds an older save sends nobody back, and keeps nothing for a restart.
TEST_F(Arenas, WhatAReaderHoldsIsForWhoAsksForIt) {
  fs::create_directories(run());
  std::shared_ptr<Store> held;
  {
    CheckpointWriter writer(keeping());
    writer.save(testing::training_state(0, 1, 1), place(1)).result();
    held = arena_store(run());
    writer.save(testing::training_state(0, 1, 2), place(2)).result();
    EXPECT_EQ(testing::loaded_number("arena://" + run()), 2);
    EXPECT_EQ(testing::loaded_number(held->name()), 1);
  }
  fs::remove_all(place(2));
  EXPECT_EQ(latest_checkpoint(run()).found->where.path, place(1));
  EXPECT_EQ(code_of([&] { (void)Checkpoint::open("arena://" + run()); }), ErrorCode::not_found);
}

// A trainer that fails while its save is under way leaves that to its process, at once.
TEST_F(Arenas, ATrainerThatFailsLeavesWhatIsUnderWay) {
  auto trainers = testing::fork_group(2, {.silence = 5s}, 30s, [&](Group& group, int rank) {
    try {
      CheckpointWriter writer(owned(group), keeping());
      writer.save(testing::training_state(rank, 2, 1), place(1)).result();
      const auto pending = writer.save(testing::training_state(rank, 2, 2), place(2));
      if (!pending.staged()) return 1;
      throw Error(ErrorCode::peer_failed, "a rank is lost");
    } catch (const Error&) {
      return 0;
    }
  });
  for (const auto& trainer : trainers) {
    int status = 1;
    ::waitpid(trainer.process, &status, 0);
    EXPECT_EQ(status, 0);
  }
  const auto latest = latest_checkpoint(run());
  ASSERT_TRUE(latest.found);
  EXPECT_EQ(latest.found->step, 2);
  const auto is_meeting = [](const auto& entry) {
    return entry.path().filename().string().starts_with(".tessera-writer-");
  };
  const auto meets = [&] { return std::ranges::any_of(fs::directory_iterator(run()), is_meeting); };
  while (!testing::is_checkpoint_at(place(2)) || meets()) std::this_thread::sleep_for(5ms);
}

// What could not be written is in memory alone: the end of the training does not wait for that.
TEST_F(Arenas, AfterASaveThatFailedTheSnapshotStays) {
  WriterOptions options = keeping();
  options.silence = 20s;
  options.rate = 1;  // bytes a second
  {
    CheckpointWriter writer(options);
    std::stop_source stop;
    SaveOptions how;
    how.stop = stop.get_token();
    const auto pending = writer.save(testing::training_state(0, 1, 2), place(2), how);
    while (kept_parts().empty()) std::this_thread::sleep_for(2ms);
    stop.request_stop();
    EXPECT_EQ(code_of([&] { pending.result(); }), ErrorCode::cancelled);
  }
  EXPECT_THAT(kept_parts(), SizeIs(1));
  EXPECT_EQ(testing::loaded_number("arena://" + place(2)), 2);
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
  const std::string inode = " " + std::to_string(kept_parts().at(0).objects.at(1).inode) + " ";
  ASSERT_NE(other.find(inode), std::string::npos);
  other.replace(other.find(inode), inode.size(), " 1 ");
  put(other, name);
  const auto failure = failure_of([&] { (void)Checkpoint::open("arena://" + place(1)); });
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->code(), ErrorCode::incomplete);
  // What is no file, and what is of this machine before it started.
  ASSERT_EQ(::mkfifo((directory + "/0123456789ab-0-1-1").c_str(), 0600), 0);
  fs::create_symlink("/dev/zero", directory + "/0123456789ab-0-1-2");
  std::string earlier = good;
  const std::string boot = same_host::boot_id();
  while (earlier.find(boot) != std::string::npos)
    earlier.replace(earlier.find(boot), boot.size(), std::string(boot.size(), '0'));
  put(earlier, name);
  EXPECT_THAT(kept_parts(), IsEmpty());
  EXPECT_FALSE(fs::exists(directory + "/" + name));
  for (const auto& entry : fs::directory_iterator(directory)) fs::remove(entry);
}

// Of one step what is stored, unless both are one save; so is a run that was begun anew.
TEST_F(Arenas, AnotherSaveOfTheStepIsNotPassedOver) {
  train_and_die(1, {5});
  EXPECT_THAT(latest_checkpoint(run()).found->where.path, ::testing::StartsWith("arena://"));
  save(testing::training_state(0, 1, 55), place(5), replacing());
  EXPECT_EQ(latest_checkpoint(run()).found->where.path, place(5));
  fs::remove_all(run());
  EXPECT_FALSE(latest_checkpoint(run()).found);
  fs::create_directories(run() + "/other");
  EXPECT_FALSE(latest_checkpoint(run()).found);
}

// Nobody goes on from what a save refused, nor from what is no checkpoint of a run.
TEST_F(Arenas, WhatASaveRefusedIsNotTheLatest) {
  const auto kept_of = [&](const SaveOptions& options, const Value& differs, int step) {
    auto* decided = testing::shared_by_processes<std::atomic<int>>();
    auto trainers = testing::fork_group(2, {.silence = 5s}, 30s, [&](Group& group, int rank) {
      CheckpointWriter writer(owned(group), keeping());
      Value state = testing::training_state(rank, 2, step);
      if (rank == 1) state.set_item("own", differs);
      if (rank == 0) state.set_item("own", 1);
      (void)failure_of([&] { writer.save(state, place(step), options).result(); });
      ++*decided;
      ::pause();
      return 0;
    });
    while (*decided < 2) std::this_thread::sleep_for(5ms);
    testing::kill_all(trainers);
    const auto found = latest_checkpoint(run()).found;
    const std::string where = found ? found->where.path : "";
    forget(kept_parts());
    while (!kept_parts().empty()) std::this_thread::sleep_for(5ms);
    return where;
  };
  fs::create_directories(run());
  EXPECT_EQ(kept_of({}, 2, 1), "");
  SaveOptions keep;
  keep.values = IfDiffers::keep;
  EXPECT_EQ(kept_of(keep, 2, 2), place(2));  // it is on the disk, by ranks
  SaveOptions weights;
  weights.kind = CheckpointKind::safetensors;
  EXPECT_EQ(kept_of(weights, 1, 3), place(2));
  EXPECT_THAT(kept_of({}, 1, 4), ::testing::StartsWith("arena://"));
}

// Snapshots of other runs beside this one are not this writer's to end.
TEST_F(Arenas, RunsSideBySideKeepTheirSnapshots) {
  auto trainers = testing::fork_group(1, {}, 30s, [&](Group& group, int) {
    CheckpointWriter writer(owned(group), keeping());
    writer.save(Value::dict({{"a", 1}}), run() + "/expA").result();
    ::kill(::getpid(), SIGKILL);
    return 0;
  });
  ::waitpid(trainers.front().process, nullptr, 0);
  CheckpointWriter writer(keeping(0ms));
  writer.save(Value::dict({{"a", 2}}), run() + "/expB").result();
  EXPECT_THAT(kept_parts(), SizeIs(1));
  while (kept_parts().at(0).trainer != kEnded) std::this_thread::sleep_for(5ms);
  writer.save(Value::dict({{"a", 2}}), run() + "/expA", replacing()).result();
  while (!kept_parts().empty()) std::this_thread::sleep_for(5ms);
}

// Ranks may have nothing of a tensor, a tensor no elements, and a value one rank alone.
TEST_F(Arenas, EmptyTensorsAndOwnValuesAreThere) {
  auto* decided = testing::shared_by_processes<std::atomic<int>>();
  auto trainers = testing::fork_group(3, {.silence = 5s}, 30s, [&](Group& group, int rank) {
    CheckpointWriter writer(owned(group), keeping());
    Value state = testing::training_state(rank, 3, 1, {{"a.w", {1}}, {"b.w", {2, 3}}});
    state.set_item("empty", numbers(0, 1.0F));
    state.at("train").set_item("rank" + std::to_string(rank), rank);
    writer.save(state, place(1)).result();
    ++*decided;
    ::pause();
    return 0;
  });
  while (*decided < 3) std::this_thread::sleep_for(5ms);
  testing::kill_all(trainers);
  EXPECT_TRUE(diff(Checkpoint::open(place(1)), Checkpoint::open("arena://" + place(1))).empty());
  run_ranks(2, [&](Group& group) {
    Value state = testing::training_state(group.rank(), 2, 0, {{"a.w", {1}}, {"b.w", {2, 3}}});
    load(state, "arena://" + place(1), group);
    EXPECT_EQ(testing::number_of(state), 1);
  });
}

// As files they may come from anywhere.
TEST_F(Arenas, PartsOfSnapshotsThatDoNotBelongTogetherAreRefused) {
  train_and_die(3, {1});
  const auto store = arena_store(place(1));
  const auto copy = memory_store();
  for (const auto& object : store->list())
    put(*copy, object.name, read_all(*store->open(object.name), 1U << 30U), IfExists::fail);
  forget(kept_parts());
  while (!kept_parts().empty()) std::this_thread::sleep_for(5ms);
  train_and_die(3, {2});
  const auto other = arena_store(place(2));
  const auto bytes_of = [](const Store& of, const std::string& name) {
    return read_all(*of.open(name), 1U << 30U);
  };
  const auto refused = [&] { return code_of([&] { (void)Checkpoint::open(Location(copy)); }); };
  for (const char* end : {"tree", "arena", "digests"}) {
    const std::string name = std::string("rank1.") + end;
    put(*copy, name, bytes_of(*other, name), IfExists::replace);
  }
  EXPECT_EQ(refused(), ErrorCode::conflict);
  for (const char* end : {"tree", "arena", "digests"}) copy->remove(std::string("rank1.") + end);
  EXPECT_EQ(refused(), ErrorCode::incomplete);
  for (const char* end : {"tree", "arena", "digests"}) copy->remove(std::string("rank2.") + end);
  EXPECT_EQ(refused(), ErrorCode::incomplete);
  EXPECT_EQ(code_of([&] {
              save(Value::dict({{"a", 1}}), "arena://" + place(9));
            }),
            ErrorCode::unsupported);
}

}  // namespace
}  // namespace tessera
