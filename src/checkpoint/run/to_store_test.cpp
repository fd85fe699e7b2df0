#include "checkpoint/run/to_store.h"

#include <fcntl.h>

#include <atomic>
#include <cstdlib>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "checkpoint/together/testing.h"
#include "storage/forwarding_store.h"
#include "storage/posix/lock.h"
#include "storage/posix/system.h"
#include "tessera/save_options.h"

namespace tessera {

// Kinds that a bucket takes only whole: saved and converted on a disk, then uploaded.

namespace {

using namespace testing_support;

constexpr CheckpointKind kOlmoKinds[] = {CheckpointKind::olmo_full, CheckpointKind::olmo_torch_new,
                                         CheckpointKind::olmo_legacy, CheckpointKind::olmo_local};

// Has neither objects that several writers fill nor directories that appear at once. From its
// `fails_from`th new object on it has no room.
class Bucket final : public testing_support::ForwardingStore {
 public:
  explicit Bucket(int fails_from = 1 << 20)
      : ForwardingStore(memory_store("bucket")), left_(fails_from) {}

  [[nodiscard]] bool has_directories() const override { return false; }
  [[nodiscard]] std::unique_ptr<ByteSink> share(std::string_view /*name*/) override {
    throw Error(ErrorCode::unsupported, "no object of several writers");
  }
  [[nodiscard]] std::unique_ptr<NewDirectory> new_directory(std::string_view /*name*/,
                                                            IfExists /*if_exists*/) override {
    throw Error(ErrorCode::unsupported, "no directory that appears whole");
  }
  [[nodiscard]] std::unique_ptr<ByteSink> create(std::string_view name, IfExists if_exists,
                                                 std::uint64_t hint) override {
    if (--left_ < 0) throw Error(ErrorCode::out_of_space, "the bucket is full");
    return inner().create(name, if_exists, hint);
  }

 private:
  std::atomic<int> left_;
};

// A directory in a store, as a checkpoint that is one is opened.
Location opened_at(const Location& where) {
  return std::make_shared<SubStore>(where.store, where.name);
}

// A directory for what is staged, while this lives.
class StagingPlace {
 public:
  StagingPlace() { set(path_); }
  StagingPlace(const StagingPlace&) = delete;
  StagingPlace& operator=(const StagingPlace&) = delete;
  ~StagingPlace() {
    if (had_one_) {
      set(before_);
    } else {
      ::unsetenv("TMPDIR");
    }
  }

  static void set(const std::string& path) { ::setenv("TMPDIR", path.c_str(), 1); }
  [[nodiscard]] const std::string& path() const { return path_; }
  // Tests make other directories there.
  [[nodiscard]] bool is_empty() const {
    return std::ranges::none_of(entries_of(path_), [](const DirectoryEntry& entry) {
      return entry.name.starts_with("tessera-staged-");
    });
  }

 private:
  const std::string path_ = temporary_directory();
  const bool had_one_ = std::getenv("TMPDIR") != nullptr;
  const std::string before_ = had_one_ ? std::getenv("TMPDIR") : "";
};

std::string write_config(const std::string& directory) {
  const std::string path = directory + "/config.yaml";
  write_text(path, "{}\n");
  return path;
}

TEST(Staged, EveryKindThatRanksSaveComesIntoABucket_O31) {
  const StagingPlace staging;
  for (const CheckpointKind kind : kOlmoKinds) {
    for (int ranks = 1; ranks <= 3; ++ranks) {
      SCOPED_TRACE(std::string(to_string(kind)) + " by " + std::to_string(ranks));
      const auto bucket = std::make_shared<Bucket>();
      const Location where(bucket, "run/step4");
      save_by(ranks, Cut::flat, where, options_for(kind));
      EXPECT_EQ(Checkpoint::open(opened_at(where)).kind, kind);
      expect_state(Checkpoint::open(opened_at(where)));
      EXPECT_TRUE(verify(opened_at(where)).findings.empty());
      EXPECT_TRUE(staging.is_empty());
      for (const ObjectInfo& object : bucket->list(""))
        EXPECT_TRUE(object.name.starts_with("run/step4/")) << object.name;
    }
  }
}

TEST(Staged, AnExistingCheckpointIsKeptOrReplaced_O31) {
  const StagingPlace staging;
  for (const CheckpointKind kind : kOlmoKinds) {
    const auto bucket = std::make_shared<Bucket>();
    const Location where(bucket, "run/step4");
    SaveOptions options = options_for(kind);
    save_by(3, Cut::flat, where, options);
    const Files before = files_in(*bucket, "");
    EXPECT_EQ(code_of([&] { save_by(2, Cut::flat, where, options); }), ErrorCode::already_exists);
    EXPECT_EQ(files_in(*bucket, ""), before);
    options.overwrite = true;
    save_by(2, Cut::flat, where, options);
    expect_state(Checkpoint::open(opened_at(where)));
    const Files after = files_in(*bucket, "");
    EXPECT_TRUE(std::ranges::none_of(after, [](const auto& file) {
      return file.first.ends_with("rank2.pt") || file.first.find("/__2_") != std::string::npos;
    }));
    EXPECT_TRUE(staging.is_empty());
  }
}

// Whichever of its objects the bucket has no room for, all ranks get one error, and nothing is
// there.
TEST(Staged, AFailureLeavesNothing) {
  const StagingPlace staging;
  for (const CheckpointKind kind : kOlmoKinds) {
    const auto whole = std::make_shared<Bucket>();
    save_by(2, Cut::flat, Location(whole, "step4"), options_for(kind));
    const auto objects = static_cast<int>(whole->list("").size());
    for (int fails_from = 0; fails_from < objects; ++fails_from) {
      SCOPED_TRACE(std::string(to_string(kind)) + " from " + std::to_string(fails_from));
      const auto bucket = std::make_shared<Bucket>(fails_from);
      EXPECT_EQ(
          code_of([&] { save_by(2, Cut::flat, Location(bucket, "step4"), options_for(kind)); }),
          ErrorCode::out_of_space);
      EXPECT_TRUE(bucket->list("").empty());
      EXPECT_TRUE(staging.is_empty());
    }
  }
}

TEST(Staged, EveryDirectoryIsConvertedIntoABucket) {
  const StagingPlace staging;
  const std::string source = temporary_directory() + "/state.pt";
  save(state_of(Cut::whole, 0, 1), source);
  for (const CheckpointKind kind : kOlmoKinds) {
    const auto bucket = std::make_shared<Bucket>();
    const Location where(bucket, "step4");
    std::uint64_t last = 0;
    ConvertOptions how;
    how.to = kind;
    how.ranks = kind == CheckpointKind::olmo_full ? 1 : 2;
    how.olmo.config = write_config(temporary_directory());
    how.progress = [&](const Progress& progress) {
      EXPECT_GE(progress.done, last);
      EXPECT_LE(progress.done, progress.total);
      last = progress.done;
    };
    EXPECT_EQ(convert(source, where, how).target, "bucket/step4");
    expect_state(Checkpoint::open(opened_at(where)));
    EXPECT_TRUE(verify(opened_at(where)).findings.empty());
    EXPECT_EQ(code_of([&] { convert(source, where, how); }), ErrorCode::already_exists);
    EXPECT_TRUE(staging.is_empty());
    how.resume = true;
    EXPECT_EQ(code_of([&] { convert(source, Location(bucket, "other"), how); }),
              ErrorCode::unsupported);
  }
}

TEST(Staged, SetsOfSafetensorsComeIntoABucket) {
  const StagingPlace staging;
  const std::string source = temporary_directory() + "/state.pt";
  save(state_of(Cut::whole, 0, 1), source);
  const auto bucket = std::make_shared<Bucket>();
  ConvertOptions how;
  how.max_shard_size = 100;
  convert(source, Location(bucket, "set"), how);
  EXPECT_TRUE(bucket->exists("set/model.safetensors.index.json"));
  expect_state(Checkpoint::open(opened_at({bucket, "set"})));
  run_ranks(3, [&](Group& group) {
    SaveOptions options;
    options.kind = CheckpointKind::safetensors;
    options.safetensors = SafetensorsSet{};
    options.safetensors->max_size = 64;
    Value model = state_of(Cut::rows, group.rank(), 3).at("model");
    save(model, Location(bucket, "saved"), options, group);
  });
  EXPECT_TRUE(bucket->exists("saved/model.safetensors.index.json"));
  EXPECT_EQ(Checkpoint::open(opened_at({bucket, "saved"})).leaves.size(), kParameters.size());
  EXPECT_TRUE(staging.is_empty());
}

TEST(Staged, WhereNothingCanBeStagedAllRanksAreTold) {
  const StagingPlace staging;
  const std::string file = temporary_directory() + "/file";
  write_text(file, "");
  StagingPlace::set(file);
  const auto bucket = std::make_shared<Bucket>();
  EXPECT_EQ(code_of([&] {
              save_by(2, Cut::flat, Location(bucket, "step4"),
                      options_for(CheckpointKind::olmo_full));
            }),
            ErrorCode::already_exists);
  EXPECT_TRUE(bucket->list("").empty());
}

TEST(Staged, WhatAKilledProcessLeftGoesAndWhatIsInUseStays) {
  const StagingPlace staging;
  const std::string left = staging.path() + "/tessera-staged-0123456789ab";
  const std::string used = staging.path() + "/tessera-staged-ba9876543210";
  const std::string other = staging.path() + "/tessera-staged-mine";
  for (const std::string& directory : {left, used, other})
    std::filesystem::create_directory(directory);
  write_text(left + "/model.pt", "half of it");
  const Fd in_use = opened(used, O_RDONLY | O_DIRECTORY);
  ASSERT_EQ(try_lock(in_use.get(), LockKind::shared), Locked::yes);
  {
    const Staging made(*solo_group());
    EXPECT_FALSE(std::filesystem::exists(left));
    EXPECT_TRUE(std::filesystem::exists(used));
    EXPECT_TRUE(std::filesystem::exists(other));
    EXPECT_TRUE(
        std::filesystem::exists(std::filesystem::path(made.place_for("s3://b/x/")).parent_path()));
    EXPECT_TRUE(made.place_for("s3://b/x/").ends_with("/x"));
  }
  EXPECT_EQ(entries_of(staging.path()).size(), 2U);
}

// Who looks for what killed processes left locks a directory that nobody has locked yet, and may
// have to wait for a processor.
TEST(Staged, ManyAtOnceDoNotKeepEachOtherOut) {
  const StagingPlace staging;
  std::vector<std::thread> threads;
  std::atomic<int> made = 0;
  for (int i = 0; i < 16; ++i) {
    threads.emplace_back([&] {
      for (int turn = 0; turn < 40; ++turn) {
        try {
          const Staging one(*solo_group());
          ++made;
        } catch (const Error& error) {
          ADD_FAILURE() << error.what();
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(made, 16 * 40);
  EXPECT_TRUE(entries_of(staging.path()).empty());
}

}  // namespace
}  // namespace tessera
