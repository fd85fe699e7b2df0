// Faults around saves of every kind of directory, by the row of docs/fault-rows.md: what goes wrong
// between ranks, writers and readers. failing_calls.cpp has the calls of the system that fail.
#include "five_kinds_testing.h"

#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <atomic>
#include <barrier>
#include <cmath>
#include <thread>

#include "conformance/forwarding_store.h"
#include "tessera/restore.h"
#include "tessera/run_directory.h"

namespace tessera {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::Not;
namespace fs = std::filesystem;

constexpr int kRounds = 4;  // of what happens at random moments

TEST(FiveKinds, R04_AnExceptionOnOneRankIsEverybodysErrorWithinSeconds) {
  for_each_kind([](CheckpointKind kind, const std::string& path) {
    save_by(2, kind, path, 1);
    const auto before = contents_of(parent_of(path));
    const auto begin = std::chrono::steady_clock::now();
    const Error error = one_error(errors_of([&](Group& group) {
      SaveOptions options = options_for_kind(kind, true);
      if (group.rank() == 1)
        options.progress = [](const Progress&) { throw std::runtime_error("of the caller"); };
      (void)save(training_state(group.rank(), 2, 2), path, options, group);
    }));
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
    EXPECT_THAT(error.what(), HasSubstr("of the caller"));
    EXPECT_EQ(contents_of(parent_of(path)), before);
    save_by(2, kind, path, 3);
    EXPECT_EQ(number_at(path), 3);
  });
}

TEST(FiveKinds, R06_RanksThatSaveIntoOtherPlacesAreRefusedAtOnce) {
  for_each_kind([](CheckpointKind kind, const std::string& path) {
    const std::string places[] = {path, parent_of(path) + "/step5"};
    const auto begin = std::chrono::steady_clock::now();
    const Error error = one_error(errors_of([&](Group& group) {
      (void)save(training_state(group.rank(), 2, 2), places[group.rank()],
                 options_for_kind(kind, false), group);
    }));
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
    EXPECT_THAT(error.code(), AnyOf(ErrorCode::mismatch, ErrorCode::incomplete)) << error.what();
    EXPECT_EQ(number_at(places[0]) + number_at(places[1]), 0);
  });
}

TEST(FiveKinds, R06_RanksThatSaveOtherKindsAreRefused) {
  for_each_kind([](CheckpointKind kind, const std::string& path) {
    const CheckpointKind other =
        kind == CheckpointKind::dcp ? CheckpointKind::olmo_full : CheckpointKind::dcp;
    const Error error = one_error(errors_of([&](Group& group) {
      const CheckpointKind own = group.rank() == 0 ? kind : other;
      (void)save(training_state(group.rank(), 2, 2), path, options_for_kind(own, false), group);
    }));
    EXPECT_EQ(error.code(), ErrorCode::mismatch);
    EXPECT_THAT(error.what(), HasSubstr("different kinds"));
    EXPECT_TRUE(fs::is_empty(parent_of(path)));
  });
}

TEST(FiveKinds, R07_AllThatRanksDoNotHaveAlikeIsToldBeforeAnythingIsWritten) {
  for_each_kind([](CheckpointKind kind, const std::string& path) {
    const Error error = one_error(errors_of([&](Group& group) {
      Value tree = training_state(group.rank(), 2, 2);
      Value& settings = tree.at("optim").at("param_groups").at(std::size_t{0});
      settings.set_item("lr", 0.1 * group.rank());
      settings.set_item("eps", group.rank());
      (void)save(tree, path, options_for_kind(kind, false), group);
    }));
    EXPECT_EQ(error.code(), ErrorCode::mismatch);
    EXPECT_THAT(error.what(), HasSubstr("param_groups.0.lr"));
    EXPECT_THAT(error.what(), HasSubstr("param_groups.0.eps"));
    EXPECT_EQ(number_at(path), 0);
  });
}

// A tensor that one rank has in another shape, or not at all.
TEST(FiveKinds, R07_TensorsThatOneRankHasOtherwiseAreRefused) {
  for_each_kind([](CheckpointKind kind, const std::string& path) {
    for (const bool lacks : {false, true}) {
      const Error error = one_error(errors_of([&](Group& group) {
        Value tree = training_state(group.rank(), 2, 2);
        if (group.rank() == 1 && lacks) tree.at("model").erase("b.bias");
        if (group.rank() == 1 && !lacks)
          tree.at("model").set_item("b.bias", flat_tensor({15}, 1, 2, 2));
        (void)save(tree, path, options_for_kind(kind, false), group);
      }));
      EXPECT_THAT(error.what(), HasSubstr("b.bias"));
      EXPECT_EQ(number_at(path), 0);
    }
  });
}

// Says that the device has so many bytes left.
class SmallRoom final : public testing_support::ForwardingStore {
 public:
  SmallRoom(std::shared_ptr<Store> inner, std::uint64_t free)
      : ForwardingStore(std::move(inner)), free_(free) {}
  [[nodiscard]] std::optional<std::uint64_t> free_bytes() const override { return free_; }

 private:
  std::uint64_t free_;
};

TEST(FiveKinds, C14_ASaveThatFindsNoRoomWritesNothing) {
  constexpr std::uint64_t kBytes = 2 * (11 * 5 + 13) * 4;  // of model and optimizer
  for (const CheckpointKind kind : kFiveKinds) {
    SCOPED_TRACE(std::string(to_string(kind)));
    const auto store = memory_store();
    const auto where = [&](std::uint64_t free) {
      const auto small = std::make_shared<SmallRoom>(store, free);
      return kind == CheckpointKind::dcp ? Location(small) : Location(small, "step4");
    };
    save_by(2, kind, where(1 << 20), 1);
    const std::size_t objects = store->list().size();
    const Error error = one_error(errors_of([&](Group& group) {
      (void)save(training_state(group.rank(), 2, 2), where(kBytes - 1),
                 options_for_kind(kind, true), group);
    }));
    EXPECT_EQ(error.code(), ErrorCode::out_of_space);
    EXPECT_THAT(error.what(), HasSubstr("the tensors have 544 bytes, 543 are free"));
    EXPECT_EQ(store->list().size(), objects);
    save_by(2, kind, where(kBytes), 2);
  }
}

TEST(FiveKinds, C14_ADiskThatIsTooSmallIsToldInFigures) {
  const TemporaryDirectory disk;
  if (::mount("tmpfs", disk.path().c_str(), "tmpfs", 0, "size=64k") != 0)
    GTEST_SKIP() << "no permission to mount";
  for (const CheckpointKind kind : kFiveKinds) {
    SCOPED_TRACE(std::string(to_string(kind)));
    const Error error = one_error(errors_of([&](Group& group) {
      Value tree = training_state(group.rank(), 2, 2);
      for (const char* part : {"model", "optim"}) {
        Value& own = part[0] == 'm' ? tree.at("model") : tree.at("optim").at("state").at("a.w");
        own.set_item(part[0] == 'm' ? "a.w" : "exp_avg",
                     flat_tensor({100, 100}, group.rank(), 2, 2));
      }
      (void)save(tree, disk.path() + "/run/step4", options_for_kind(kind, false), group);
    }));
    EXPECT_EQ(error.code(), ErrorCode::out_of_space) << error.what();
    EXPECT_THAT(error.what(), HasSubstr("are free"));
    EXPECT_TRUE(!fs::exists(disk.path() + "/run") || fs::is_empty(disk.path() + "/run"));
  }
  ::umount2(disk.path().c_str(), MNT_DETACH);
}

// Two trainings of two ranks save the same step at the same time: the codes of their errors.
std::vector<std::optional<ErrorCode>> race(CheckpointKind kind, const std::string& path,
                                           bool overwrite) {
  std::vector<std::optional<ErrorCode>> codes(2);
  std::barrier start(2);
  std::vector<std::jthread> trainings;
  for (int training = 0; training < 2; ++training) {
    trainings.emplace_back([&, training] {
      start.arrive_and_wait();
      try {
        save_by(2, kind, path, 10 + training, overwrite);
      } catch (const Error& error) {
        codes[static_cast<std::size_t>(training)] = error.code();
      }
    });
  }
  trainings.clear();
  return codes;
}

TEST(FiveKinds, C01_OfTwoWritersOfAStepOneWinsAndTheOtherHearsIt) {
  for_each_kind([](CheckpointKind kind, const std::string& path) {
    for (int round = 0; round < kRounds; ++round) {
      fs::remove_all(path);
      const auto codes = race(kind, path, false);
      ASSERT_NE(codes[0].has_value(), codes[1].has_value()) << "round " << round;
      const int winner = codes[0] ? 11 : 10;
      EXPECT_EQ(number_at(path), winner);
      EXPECT_THAT(*(codes[0] ? codes[0] : codes[1]),
                  AnyOf(ErrorCode::conflict, ErrorCode::already_exists));
    }
  });
}

TEST(FiveKinds, C01_OfTwoWritersThatReplaceNothingIsMixed) {
  for_each_kind([](CheckpointKind kind, const std::string& path) {
    for (int round = 0; round < kRounds; ++round) {
      save_by(1, kind, path, 1);
      const auto codes = race(kind, path, true);
      ASSERT_FALSE(codes[0] && codes[1]) << "round " << round;
      const int number = number_at(path);
      EXPECT_TRUE((number == 10 && !codes[0]) || (number == 11 && !codes[1])) << number;
      for (const auto& code : codes)
        EXPECT_EQ(code.value_or(ErrorCode::conflict), ErrorCode::conflict);
    }
    const auto store = posix_store(parent_of(path));
    for (const ObjectInfo& object : store->list())
      EXPECT_TRUE(object.name.starts_with("step4/")) << object.name;
  });
}

// Reads the path again and again while `write` runs: what the reads found, and the errors.
struct Seen {
  int reads = 0, missed = 0;
  std::vector<std::string> wrong;
};
Seen read_during(const std::string& path, const std::function<void()>& write,
                 const std::function<void(const Error&, Seen&)>& check) {
  Seen seen;
  std::atomic<bool> is_done = false;
  std::jthread reader([&] {
    do {
      ++seen.reads;
      try {
        if (!is_checkpoint_at(path)) {
          ++seen.missed;
        } else {
          (void)loaded_number(path);
        }
      } catch (const Error& error) {
        check(error, seen);
      }
    } while (!is_done);
  });
  write();
  is_done = true;
  reader.join();
  return seen;
}

TEST(FiveKinds, C03_AReaderDuringTheFirstSaveFindsNothingOrAllOfIt) {
  for_each_kind([](CheckpointKind kind, const std::string& path) {
    for (int round = 0; round < kRounds; ++round) {
      fs::remove_all(path);
      const Seen seen = read_during(
          path, [&] { save_by(2, kind, path, 5, false); },
          [](const Error& error, Seen& all) { all.wrong.emplace_back(error.what()); });
      EXPECT_TRUE(seen.wrong.empty()) << seen.wrong.front();
      EXPECT_EQ(number_at(path), 5);
    }
  });
}

// A reader that began with the old checkpoint reads all of it, or hears that it is gone.
TEST(FiveKinds, C04_AReaderDuringAReplacementFindsTheOldOneOrTheNewOne) {
  for_each_kind([](CheckpointKind kind, const std::string& path) {
    save_by(2, kind, path, 1);
    const auto write = [&] {
      for (int number = 2; number < 2 + kRounds; ++number) save_by(2, kind, path, number);
    };
    const Seen seen = read_during(path, write, [](const Error& error, Seen& all) {
      const bool is_gone =
          error.code() == ErrorCode::not_found || error.code() == ErrorCode::conflict;
      if (!is_gone) all.wrong.emplace_back(error.what());
    });
    EXPECT_TRUE(seen.wrong.empty()) << seen.wrong.front();
    EXPECT_GT(seen.reads, 1);
    EXPECT_EQ(number_at(path), 1 + kRounds);
  });
}

// All sizes are the same, so only the opening can tell one save from the other.
TEST(FiveKinds, C04_WhatWasOpenedBeforeAReplacementIsNotReadAsAMixture) {
  for_each_kind([](CheckpointKind kind, const std::string& path) {
    save_by(2, kind, path, 1);
    const Checkpoint opened = Checkpoint::open(path);
    save_by(2, kind, path, 2);
    try {
      const Value tree = opened.load();
      for (const Leaf& leaf : leaves_of(tree)) {
        if (!leaf.value.is(Value::Kind::tensor)) continue;
        EXPECT_TRUE(is_filled_with(leaf.value.as_tensor(), 1)) << leaf.name;
      }
    } catch (const Error& error) {
      EXPECT_THAT(error.code(), AnyOf(ErrorCode::not_found, ErrorCode::conflict)) << error.what();
    }
  });
}

// As when another save takes its place between what rank 0 and rank 1 do.
TEST(FiveKinds, C04_RanksThatFindDifferentSavesDoNotLoadAMixture) {
  for_each_kind([](CheckpointKind kind, const std::string& path) {
    const std::string places[] = {path, parent_of(path) + "/other"};
    for (int rank = 0; rank < 2; ++rank) save_by(2, kind, places[rank], 1 + rank);
    const Error error = one_error(errors_of([&](Group& group) {
      Value model = Value::dict({{"model", training_state(group.rank(), 2, 0).at("model")}});
      (void)load(model, places[group.rank()], {}, group);
    }));
    EXPECT_THAT(error.code(), AnyOf(ErrorCode::conflict, ErrorCode::not_found)) << error.what();
  });
}

// Sees the directory late, as another node of a network file system may.
class LateStore final : public testing_support::ForwardingStore {
 public:
  LateStore(std::shared_ptr<Store> inner, std::string name, std::chrono::milliseconds late)
      : ForwardingStore(std::move(inner)), name_(std::move(name)), late_(late) {}
  [[nodiscard]] bool exists(std::string_view name) const override {
    if (!name.starts_with(name_ + "/")) return ForwardingStore::exists(name);
    const auto now = std::chrono::steady_clock::now();
    if (!asked_) asked_ = now;
    return now - *asked_ > late_ && ForwardingStore::exists(name);
  }

 private:
  const std::string name_;
  const std::chrono::milliseconds late_;
  mutable std::optional<std::chrono::steady_clock::time_point> asked_;
};

TEST(FiveKinds, F24_OtherRanksWaitForADirectoryThatTheySeeLate) {
  for_each_kind([](CheckpointKind kind, const std::string& path) {
    if (kind == CheckpointKind::dcp) return;  // its directory is there before: ProbeTest has it
    const auto store = posix_store(parent_of(path));
    const auto begin = std::chrono::steady_clock::now();
    run_ranks(2, [&](Group& group) {
      const std::chrono::milliseconds late(300);
      const auto own = std::make_shared<LateStore>(store, "step4", late);
      const Location where(group.rank() == 0 ? store : std::shared_ptr<Store>(own), "step4");
      (void)save(training_state(group.rank(), 2, 2), where, options_for_kind(kind, false), group);
    });
    EXPECT_GE(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(300));
    EXPECT_EQ(number_at(path), 2);
  });
}

TEST(FiveKinds, F25_DisksThatOnlyLookAlikeAreRefusedWhereRanksNeedOne) {
  for (const CheckpointKind kind : {CheckpointKind::dcp, CheckpointKind::olmo_torch_new}) {
    SCOPED_TRACE(std::string(to_string(kind)));
    const TemporaryDirectory disks[2];
    const Error error = one_error(errors_of([&](Group& group) {
      (void)save(training_state(group.rank(), 2, 2), disks[group.rank()].path() + "/step4",
                 options_for_kind(kind, false), group);
    }));
    EXPECT_EQ(error.code(), ErrorCode::incomplete);
    EXPECT_THAT(error.what(), HasSubstr("rank 1 on "));
    for (const auto& disk : disks) EXPECT_EQ(number_at(disk.path() + "/step4"), 0);
  }
}

// The mode that everything below has, files and directories.
void expect_modes(const std::string& directory, mode_t files, mode_t directories, gid_t group) {
  for (const auto& entry : fs::recursive_directory_iterator(directory)) {
    struct stat status {};
    ASSERT_EQ(::lstat(entry.path().c_str(), &status), 0);
    EXPECT_EQ(status.st_mode & 07777U, entry.is_directory() ? directories : files) << entry.path();
    EXPECT_EQ(status.st_gid, group) << entry.path();
  }
}

TEST(FiveKinds, F30_UmaskAndTheDirectorysGroupCount) {
  const mode_t before = ::umask(027);
  for_each_kind([](CheckpointKind kind, const std::string& path) {
    const std::string run = parent_of(path);
    const gid_t other = ::geteuid() == 0 ? 12345 : ::getegid();
    ASSERT_EQ(::chown(run.c_str(), ::geteuid(), other), 0);
    ASSERT_EQ(::chmod(run.c_str(), 02770), 0);
    for (int number = 1; number <= 2; ++number) {  // new, and in place of another one
      save_by(2, kind, path, number);
      expect_modes(run, 0640, 02750, other);
    }
  });
  ::umask(before);
}

// An access list for new files: an entry for one more user, who may read and write.
std::string default_list() {
  std::string list("\x02\0\0\0", 4);
  const auto add = [&list](std::uint16_t tag, std::uint16_t rights, std::uint32_t id) {
    list.append(reinterpret_cast<const char*>(&tag), sizeof tag);
    list.append(reinterpret_cast<const char*>(&rights), sizeof rights);
    list.append(reinterpret_cast<const char*>(&id), sizeof id);
  };
  constexpr std::uint32_t kNobodys = 0xFFFFFFFF;
  add(0x01, 7, kNobodys);  // the owner
  add(0x02, 6, 12345);     // the user
  add(0x04, 5, kNobodys);  // the group
  add(0x10, 7, kNobodys);  // the mask
  add(0x20, 0, kNobodys);  // others
  return list;
}

TEST(FiveKinds, F30_TheDirectorysAccessListCounts) {
  for_each_kind([](CheckpointKind kind, const std::string& path) {
    const std::string list = default_list();
    if (::setxattr(parent_of(path).c_str(), "system.posix_acl_default", list.data(), list.size(),
                   0) != 0)
      GTEST_SKIP() << "the file system has no access lists";
    save_by(2, kind, path, 1);
    for (const auto& entry : fs::recursive_directory_iterator(path))
      EXPECT_GT(::getxattr(entry.path().c_str(), "system.posix_acl_access", nullptr, 0), 0)
          << entry.path();
  });
}

// Whether every element that the rank holds of its tensors is `is`.
bool all_elements(const Value& tree, const std::function<bool(float)>& is) {
  int elements = 0;
  for (const Leaf& leaf : leaves_of(tree)) {
    if (!leaf.value.is(Value::Kind::tensor)) continue;
    for (const Piece& piece : leaf.value.as_tensor().pieces) {
      const auto* begin = reinterpret_cast<const float*>(piece.storage->data);
      const auto* end = begin + numel(piece.slice);
      elements += static_cast<int>(end - begin);
      if (!std::all_of(begin, end, is)) return false;
    }
  }
  return elements > 0;
}

// What a rank of two or more loads, all of it `number`.
Value live_state(int rank, int number, int ranks = 2) {
  const Value state = training_state(rank, ranks, number);
  return Value::dict({{"model", state.at("model")},
                      {"optim", Value::dict({{"state", state.at("optim").at("state")}})}});
}

TEST(FiveKinds, R19_DamageThatOneRankReadsIsTheErrorOfAll) {
  for_each_kind([](CheckpointKind kind, const std::string& path) {
    save_by(2, kind, path, 1);
    const std::string file = file_of_rank_one(kind, path);
    fs::resize_file(file, fs::file_size(file) / 2);
    const auto begin = std::chrono::steady_clock::now();
    const Error error = one_error(errors_of([&](Group& group) {
      Value tree = live_state(group.rank(), 3);
      try {
        (void)load(tree, path, {}, group);
      } catch (const Error&) {  // before any memory was written
        EXPECT_TRUE(all_elements(tree, [](float element) { return element == 3; }));
        throw;
      }
    }));
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
    EXPECT_THAT(error.code(), AnyOf(ErrorCode::corrupt, ErrorCode::incomplete)) << error.what();
    EXPECT_THAT(error.what(), HasSubstr(fs::path(file).filename().string()));
    EXPECT_THAT(error.what(), Not(HasSubstr("NaN")));
  });
}

// Changes the last element of `number` in a file that rank 1 reads. Returns the file's name.
std::string damage_element_of_rank_one(const std::string& path, float number) {
  std::string elements;
  for (int i = 0; i < 3; ++i)
    elements.append(reinterpret_cast<const char*>(&number), sizeof number);
  for (const auto& [name, bytes] : contents_of(path)) {
    const std::string file = fs::path(name).filename().string();
    if (!file.starts_with("__1_") && file != "rank1.pt" && file != "model.pt") continue;
    const std::size_t at = bytes.rfind(elements);
    if (at == std::string::npos) continue;
    std::fstream stream(name, std::ios::in | std::ios::out | std::ios::binary);
    stream.seekp(static_cast<std::streamoff>(at));
    stream.put(static_cast<char>(bytes[at] ^ 1));
    return file;
  }
  throw std::runtime_error("no file of rank 1 has the elements");
}

// Loads what a rank has saved itself.
void restore(Value& tree, const std::string& path, Group& group) {
  auto found = GroupCheckpoint::open(path, tree.at("model"), {}, group);
  (void)found.load(tree);
}

// Rank 0 has read all of its own: it must not go on with that either. An archive has one checksum a
// tensor, which only who reads all of it can compare: of `full` rank 1 wants whole tensors.
TEST(FiveKinds, R19_AfterDamageThatOneRankReadsNoRankHasValues_Q02) {
  for_each_kind([](CheckpointKind kind, const std::string& path) {
    save_by(2, kind, path, 7);
    const std::string file = damage_element_of_rank_one(path, 7);
    const Error error = one_error(errors_of([&](Group& group) {
      const bool is_whole = kind == CheckpointKind::olmo_full && group.rank() == 1;
      Value tree = is_whole ? live_state(0, 3, 1) : live_state(group.rank(), 3);
      if (kind == CheckpointKind::olmo_local) tree.erase("optim");  // goes by numbers
      try {
        restore(tree, path, group);
      } catch (const Error&) {
        EXPECT_TRUE(all_elements(tree, [](float element) { return std::isnan(element); }));
        throw;
      }
    }));
    EXPECT_EQ(error.code(), ErrorCode::corrupt) << error.what();
    EXPECT_THAT(error.what(), HasSubstr("after which all that it was to fill is NaN"));
    EXPECT_THAT(error.path(), HasSubstr(file));
    EXPECT_THAT(error.key(), AnyOf(HasSubstr("a.w"), HasSubstr("b.bias"))) << error.what();
    EXPECT_TRUE(error.offset().has_value()) << error.what();
  });
}

TEST(FiveKinds, C12_WhileTheNewOneIsNotWholeTheLastOneStays) {
  for_each_kind([](CheckpointKind kind, const std::string& path) {
    const std::string run = parent_of(path);
    for (const char* name : {"/step3", "/step4"}) save_by(2, kind, run + name, name[5] - '0');
    const RunCheckpoint saved = run_checkpoint(run, 4);
    const std::string file = file_of_rank_one(kind, path);
    fs::resize_file(file, fs::file_size(file) - 10);
    EXPECT_ANY_THROW((void)retain(run, saved, {.sharded = 1}));
    EXPECT_EQ(number_at(run + "/step3"), 3);
    save_by(2, kind, path, 4);
    EXPECT_EQ(retain(run, saved, {.sharded = 1}).removed.size(), 1U);
    EXPECT_FALSE(fs::exists(run + "/step3"));
    EXPECT_EQ(number_at(path), 4);
  });
}

// The newest that can be opened, which is not the newest that is there.
TEST(FiveKinds, C09_ALinkThatLeadsNowhereNamesTheNewestCheckpoint) {
  for_each_kind([](CheckpointKind kind, const std::string& path) {
    const std::string run = parent_of(path);
    for (const char* name : {"step4", "step12", "step20"}) save_by(1, kind, run + "/" + name, 1);
    for (const char* marker : {"/step20/.metadata", "/step20/model_and_optim/.metadata"})
      if (fs::exists(run + marker)) fs::resize_file(run + marker, 10);
    for (const auto& entry : fs::recursive_directory_iterator(run + "/step20"))
      if (entry.path().extension() == ".pt") fs::resize_file(entry.path(), 10);
    fs::create_directory_symlink("step30", run + "/latest");
    const Error error = error_of([&] { (void)Checkpoint::open(run + "/latest"); });
    EXPECT_EQ(error.code(), ErrorCode::not_found);
    EXPECT_THAT(error.what(), HasSubstr("leads to step30, which is not there"));
    EXPECT_THAT(error.what(), HasSubstr("the newest checkpoint beside it is step12"));
  });
}

TEST(FiveKinds, R03_CommittedKnowsTheSaveOfEveryKind) {
  for_each_kind([](CheckpointKind kind, const std::string& path) {
    std::string ids[2];
    for (std::string& id : ids)
      id = save(training_state(0, 1, 1), path, options_for_kind(kind, true)).save_id;
    EXPECT_FALSE(committed(path, ids[0]));
    EXPECT_TRUE(committed(path, ids[1]));
    fs::remove_all(path);
    EXPECT_FALSE(committed(path, ids[1]));
  });
}

}  // namespace
}  // namespace tessera
