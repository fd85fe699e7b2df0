#include "checkpoint/run/upload.h"

#include <set>
#include <span>

#include <gmock/gmock.h>

#include "checkpoint/run/testing.h"
#include "tessera/copy.h"

namespace tessera {

// Uploads: checkpoint-rows O-08, O-18, O-19, O-31, OQ-08; fault-rows C08, C12.

namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)
using ::testing::IsEmpty;

std::shared_ptr<Store> store_of(CheckpointKind kind) {
  return posix_store(written(kind));
}

std::string marker_of(CheckpointKind kind) {
  return kind == CheckpointKind::dcp ? ".metadata" : "config.yaml";
}

TEST(Upload, EveryKindArrivesAsItIs_O08) {
  for (const CheckpointKind kind : marked_kinds()) {
    SCOPED_TRACE(to_string(kind));
    const Contents wanted = contents_of(*store_of(kind));
    for (const int ranks : {1, 3}) {
      const auto target = memory_store();
      std::atomic<std::uint64_t> files{0}, bytes{0};
      run_ranks(ranks, [&](Group& group) {
        const UploadReport report = upload(written(kind), target, {.read_back = true}, group);
        files += report.files;
        bytes += report.bytes;
        EXPECT_EQ(report.total_files, wanted.size());
        std::uint64_t total = 0;
        for (const auto& [name, content] : wanted) total += content.size();
        EXPECT_EQ(report.total_bytes, total);
        EXPECT_TRUE(group.rank() > 0 || report.files > 0);
      });
      EXPECT_EQ(contents_of(*target), wanted);
      EXPECT_EQ(files, wanted.size());
      EXPECT_THAT(verify(target).findings, IsEmpty());
    }
  }
}

TEST(Upload, GoesFromAStoreToADiskAndBetweenDirectories) {
  const std::string work = temporary_directory();
  const auto wanted = contents_of(*store_of(CheckpointKind::olmo_torch_new));
  const auto bucket = memory_store();
  (void)upload(written(CheckpointKind::olmo_torch_new), {bucket, "run/step5"});
  EXPECT_EQ(bucket->list().size(), bucket->list("run/step5").size());
  (void)upload({bucket, "run/step5"}, work + "/new/step5");
  EXPECT_EQ(contents_of(*posix_store(work + "/new/step5")), wanted);
  EXPECT_EQ(latest_checkpoint({bucket, "run"}).found->step, 5);
}

TEST(Upload, FilesAreSharedOutByTheirSizes_O18) {
  const auto source = memory_store();
  std::uint64_t largest = 0;
  for (int i = 0; i < 40; ++i) {
    const std::vector<std::byte> bytes(static_cast<std::size_t>((i * 7919) % 5000));
    largest = std::max<std::uint64_t>(largest, bytes.size());
    put(*source, "model/rank" + std::to_string(i) + ".pt", bytes, IfExists::fail);
  }
  put(*source, "config.yaml", {}, IfExists::fail);
  const auto target = memory_store();
  std::mutex mutex;
  std::vector<std::uint64_t> bytes;
  run_ranks(4, [&](Group& group) {
    const UploadReport report = upload(source, target, {}, group);
    const std::lock_guard lock(mutex);
    bytes.push_back(report.bytes);
  });
  const auto [least, most] = std::ranges::minmax(bytes);
  EXPECT_GT(least, 0U);
  EXPECT_LE(most - least, largest);
  EXPECT_EQ(contents_of(*target), contents_of(*source));
}

// Nodes whose disks have the files of their own ranks alone.
TEST(Upload, RanksThatSeeTheirOwnFilesCopyThose_O18) {
  for (const CheckpointKind kind : {CheckpointKind::olmo_local, CheckpointKind::olmo_legacy}) {
    const auto all = store_of(kind);
    const std::vector disks{memory_store(), memory_store()};
    for (const auto& [name, content] : contents_of(*all)) {
      const bool is_second = name.ends_with("rank1.pt");
      put(*disks[is_second ? 1 : 0], name, content, IfExists::fail);
    }
    const auto target = memory_store();
    run_ranks(4, [&](Group& group) {  // two on each node
      const auto& disk = disks[static_cast<std::size_t>(group.rank() / 2)];
      (void)upload(disk, target, {}, group);
    });
    EXPECT_EQ(contents_of(*target), contents_of(*all));
    // One name with two sizes is not one checkpoint.
    put(*disks[1], "config.yaml", bytes_of("other: 1\n# and more\n"), IfExists::replace);
    run_ranks(2, [&](Group& group) {
      const auto& disk = disks[static_cast<std::size_t>(group.rank())];
      const Error error = error_of([&] { (void)upload(disk, memory_store(), {}, group); });
      EXPECT_EQ(error.code(), ErrorCode::conflict) << error.what();
      EXPECT_EQ(error.path(), "config.yaml");
    });
  }
}

TEST(Upload, LeftoversAreNotCopied) {
  const std::string source = temporary_directory();
  save_step(source, 1);
  const Contents wanted = contents_of(*posix_store(source));
  for (const char* left :
       {"__0_0_0123456789ab.distcp", "tessera-0123456789ab.probe", "tessera-5f1e.json"}) {
    write_text(source + "/" + left, "x");
  }
  const auto target = memory_store();
  (void)upload(source, target);
  EXPECT_EQ(contents_of(*target), wanted);
}

// Notes what becomes visible and what goes, and how much is written at once.
class NotingStore final : public testing_support::ForwardingStore {
 public:
  using ForwardingStore::ForwardingStore;
  [[nodiscard]] std::unique_ptr<ByteSink> create(std::string_view name, IfExists if_exists,
                                                 std::uint64_t size_hint) override {
    return std::make_unique<Sink>(*this, std::string(name),
                                  ForwardingStore::create(name, if_exists, size_hint));
  }
  void remove(std::string_view name) override {
    note("-" + std::string(name));
    ForwardingStore::remove(name);
  }
  void note(const std::string& text) {
    const std::lock_guard lock(mutex_);
    notes.push_back(text);
  }

  std::vector<std::string> notes;
  std::atomic<std::size_t> largest_write{0};

 private:
  class Sink final : public ByteSink {
   public:
    Sink(NotingStore& store, std::string name, std::unique_ptr<ByteSink> sink)
        : store_(store), name_(std::move(name)), sink_(std::move(sink)) {}
    void write_at(std::uint64_t offset, ByteView bytes) override {
      if (bytes.size() > store_.largest_write) store_.largest_write = bytes.size();
      sink_->write_at(offset, bytes);
    }
    void commit() override {
      sink_->commit();
      store_.note("+" + name_);
    }
    [[nodiscard]] const std::string& name() const override { return name_; }

   private:
    NotingStore& store_;
    std::string name_;
    std::unique_ptr<ByteSink> sink_;
  };
  std::mutex mutex_;
};

TEST(Upload, TheMarkerGoesFirstAndComesLast_O19_O31_OQ08) {
  for (const CheckpointKind kind : marked_kinds()) {
    const auto inner = memory_store();
    copy_objects(store_of(CheckpointKind::olmo_torch_new), *inner);
    const auto target = std::make_shared<NotingStore>(inner);
    run_ranks(
        2, [&](Group& group) { (void)upload(written(kind), target, {.overwrite = true}, group); });
    EXPECT_EQ(target->notes.at(0), "-config.yaml");
    EXPECT_EQ(target->notes.at(1), "-model_and_optim/.metadata");
    EXPECT_EQ(target->notes.back(), "+" + marker_of(kind));
    const bool has_inner = kind == CheckpointKind::olmo_torch_new;
    EXPECT_EQ(*(target->notes.end() - 2) == "+model_and_optim/.metadata", has_inner);
  }
}

TEST(Upload, FilesAreCopiedInWindows) {
  const auto source = memory_store();
  put(*source, "model.pt", std::vector<std::byte>(17 << 20), IfExists::fail);
  put(*source, "config.yaml", {}, IfExists::fail);
  const auto target = std::make_shared<NotingStore>(memory_store());
  (void)upload(source, target);
  EXPECT_EQ(target->largest_write, std::size_t{8} << 20);
  EXPECT_EQ(contents_of(*target), contents_of(*source));
}

TEST(Upload, WhatIsThereStaysUnlessItIsOverwritten_O08) {
  const auto target = memory_store();
  save_step(target, 1);
  put(*target, "notes.txt", bytes_of("mine"), IfExists::fail);
  const Contents before = contents_of(*target);
  const std::string source = written(CheckpointKind::olmo_legacy);
  run_ranks(2, [&](Group& group) {
    EXPECT_EQ(code_of([&] { (void)upload(source, target, {}, group); }), ErrorCode::already_exists);
  });
  EXPECT_EQ(contents_of(*target), before);
  target->remove(".metadata");  // its data is another checkpoint's still
  EXPECT_EQ(code_of([&] { (void)upload(source, target); }), ErrorCode::already_exists);
  EXPECT_EQ(contents_of(*target).size() + 1, before.size());
  (void)upload(source, target, {.overwrite = true});
  Contents wanted = contents_of(*posix_store(source));
  wanted["notes.txt"] = before.at("notes.txt");
  EXPECT_EQ(contents_of(*target), wanted);
  // What an interrupted upload of the same files left is no obstacle.
  target->remove("config.yaml");
  put(*target, "rank0.pt", bytes_of("half"), IfExists::replace);
  (void)upload(source, target);
  EXPECT_EQ(contents_of(*target), wanted);
}

struct KillCase {
  CheckpointKind kind;
  bool overwrites;
  int ranks;
};

// Uploads to a target that dies after so many calls. Whether it got through.
bool upload_until(std::uint64_t calls, const KillCase& row, const std::shared_ptr<Store>& inner) {
  const auto dying = std::make_shared<DyingStore>(inner, calls, DyingStore::Counts::everything);
  std::atomic<int> failed{0};
  run_ranks(row.ranks, [&](Group& group) {
    try {
      (void)upload(written(row.kind), dying, {.overwrite = row.overwrites, .threads = 1}, group);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::io) << error.what();
      ++failed;
    }
  });
  EXPECT_TRUE(failed == 0 || failed == row.ranks) << failed;
  return failed == 0;
}

// The target stops answering after each of its calls. A marker that is there then belongs to all of
// the old checkpoint or to all of the new one (fault-rows C08).
TEST(Upload, AKillLeavesTheOldOneNoneOrTheNewOne_OQ08) {
  const Contents old_contents = [] {
    const auto store = memory_store();
    save_step(store, 1);
    return contents_of(*store);
  }();
  for (const CheckpointKind kind : marked_kinds()) {
    const Contents new_contents = contents_of(*store_of(kind));
    for (const bool overwrites : {false, true}) {
      SCOPED_TRACE(std::string(to_string(kind)) + (overwrites ? " over another one" : ""));
      const KillCase row{kind, overwrites, overwrites ? 2 : 1};
      std::set<std::string> seen;
      for (std::uint64_t calls = 0;; ++calls) {
        const auto inner = memory_store();
        if (overwrites) {
          for (const auto& [name, content] : old_contents)
            put(*inner, name, content, IfExists::fail);
        }
        const bool done = upload_until(calls, row, inner);
        const Contents left = contents_of(*inner);
        if (!is_marked(*inner)) {
          seen.insert("none");
        } else if (left == old_contents) {
          seen.insert("old");
        } else {
          EXPECT_EQ(left, new_contents) << calls;
          seen.insert("new");
        }
        if (!done) continue;
        EXPECT_EQ(left, new_contents);
        EXPECT_GT(calls, new_contents.size());
        break;
      }
      EXPECT_EQ(seen.contains("old"), overwrites);
      EXPECT_TRUE(seen.contains("none"));
    }
  }
}

// One rank's target fails while the others' works: all get its error, and nothing stays.
TEST(Upload, AFailureOfOneRankIsEverybodysAndLeavesNothing_O18) {
  const std::string source = written(CheckpointKind::olmo_local);
  for (int bad = 0; bad < 3; ++bad) {
    const auto inner = memory_store();
    run_ranks(3, [&](Group& group) {
      std::shared_ptr<Store> target = inner;
      // A full disk: what is there can still be removed.
      class Full final : public testing_support::ForwardingStore {
       public:
        using ForwardingStore::ForwardingStore;
        [[nodiscard]] std::unique_ptr<ByteSink> create(std::string_view name, IfExists if_exists,
                                                       std::uint64_t size_hint) override {
          return std::make_unique<FaultySink>(ForwardingStore::create(name, if_exists, size_hint),
                                              std::make_shared<Fault>(ErrorCode::out_of_space, 0));
        }
      };
      if (group.rank() == bad) target = std::make_shared<Full>(inner);
      const Error error = error_of([&] { (void)upload(source, target, {}, group); });
      EXPECT_EQ(error.code(), ErrorCode::out_of_space) << error.what();
      EXPECT_TRUE(error.peers().contains(bad));
    });
    EXPECT_THAT(contents_of(*inner), IsEmpty()) << bad;
  }
}

// Only that the marker is durable is not known: it is there, so nothing that it stands for goes.
TEST(Upload, NothingIsWithdrawnUnderAMarkerThatIsThere) {
  class Forgetful final : public testing_support::ForwardingStore {
   public:
    using ForwardingStore::ForwardingStore;
    void sync() override {
      if (inner().exists("config.yaml")) throw Error(ErrorCode::io, "no answer");
    }
  };
  const auto inner = memory_store();
  const auto target = std::make_shared<Forgetful>(inner);
  run_ranks(2, [&](Group& group) {
    EXPECT_EQ(
        code_of([&] { (void)upload(written(CheckpointKind::olmo_local), target, {}, group); }),
        ErrorCode::io);
  });
  EXPECT_EQ(contents_of(*inner), contents_of(*store_of(CheckpointKind::olmo_local)));
}

TEST(Upload, ARequestToStopEndsItOnAllRanks) {
  const auto inner = memory_store();
  run_ranks(2, [&](Group& group) {
    std::stop_source stop;
    UploadOptions options;
    options.stop = stop.get_token();
    if (group.rank() == 1) options.progress = [&](const Progress&) { stop.request_stop(); };
    EXPECT_EQ(
        code_of([&] { (void)upload(written(CheckpointKind::olmo_local), inner, options, group); }),
        ErrorCode::cancelled);
  });
  EXPECT_THAT(contents_of(*inner), IsEmpty());
}

// Each file is damaged by itself, and read by whoever copies it.
TEST(Upload, DamageIsNotCopied) {
  std::set<int> found_by;
  for (const CheckpointKind kind :
       {CheckpointKind::dcp, CheckpointKind::olmo_torch_new, CheckpointKind::olmo_legacy}) {
    for (const ObjectInfo& file : store_of(kind)->list()) {
      if (!file.name.ends_with(".distcp") && !file.name.ends_with("rank1.pt")) continue;
      const auto source = memory_store();
      copy_objects(store_of(kind), *source);
      auto bytes = read_all(*source->open(file.name), 1 << 26);
      bytes[bytes.size() / 2] ^= std::byte{1};
      put(*source, file.name, bytes, IfExists::replace);
      const auto target = memory_store();
      run_ranks(3, [&](Group& group) {
        const Error error = error_of([&] { (void)upload(source, target, {}, group); });
        EXPECT_EQ(error.code(), ErrorCode::corrupt) << error.what();
        if (group.rank() == 0) found_by.insert(error.peers().begin()->first);
      });
      EXPECT_THAT(contents_of(*target), IsEmpty());
    }
  }
  EXPECT_GT(found_by.size(), 1U);
}

TEST(Upload, RankZeroAloneReadsTheMetadata) {
  class WithoutMetadata final : public testing_support::ForwardingStore {
   public:
    using ForwardingStore::ForwardingStore;
    [[nodiscard]] std::shared_ptr<ByteSource> open(std::string_view name) const override {
      if (name.ends_with(".metadata")) throw Error(ErrorCode::io, "not for you");
      return ForwardingStore::open(name);
    }
  };
  for (const CheckpointKind kind : {CheckpointKind::dcp, CheckpointKind::olmo_torch_new}) {
    const auto target = memory_store();
    run_ranks(3, [&](Group& group) {
      std::shared_ptr<Store> source = store_of(kind);
      if (group.rank() > 0) source = std::make_shared<WithoutMetadata>(source);
      (void)upload(source, target, {}, group);
    });
    EXPECT_EQ(contents_of(*target), contents_of(*store_of(kind)));
  }
}

// A target that keeps something else than it was given.
class LyingStore final : public testing_support::ForwardingStore {
 public:
  LyingStore(std::shared_ptr<Store> inner, std::size_t lost)
      : ForwardingStore(std::move(inner)), lost_(lost) {}
  [[nodiscard]] std::unique_ptr<ByteSink> create(std::string_view name, IfExists if_exists,
                                                 std::uint64_t /*size_hint*/) override {
    return memory_sink(std::string(name),
                       [this, key = std::string(name), if_exists](std::vector<std::byte> bytes) {
                         if (key == "rank1.pt") {
                           bytes.resize(bytes.size() - lost_);
                           bytes[bytes.size() / 2] ^= std::byte{1};
                         }
                         put(inner(), key, bytes, if_exists);
                       });
  }

 private:
  std::size_t lost_;
};

TEST(Upload, WhatArrivesIsComparedBySizeAndOnDemandByItsBytes) {
  const std::string source = written(CheckpointKind::olmo_legacy);
  const auto code = [&](std::size_t lost, bool read_back) {
    const auto inner = memory_store();
    const auto target = std::make_shared<LyingStore>(inner, lost);
    const ErrorCode found =
        code_of([&] { (void)upload(source, target, {.read_back = read_back}); });
    EXPECT_THAT(contents_of(*inner), IsEmpty());
    return found;
  };
  EXPECT_EQ(code(1, false), ErrorCode::incomplete);
  EXPECT_EQ(code(0, true), ErrorCode::corrupt);
}

TEST(Upload, RanksMustWriteIntoOnePlace) {
  run_ranks(2, [&](Group& group) {
    const auto own = memory_store();
    const Error error =
        error_of([&] { (void)upload(written(CheckpointKind::olmo_local), own, {}, group); });
    EXPECT_EQ(error.code(), ErrorCode::incomplete) << error.what();
    EXPECT_THAT(contents_of(*own), IsEmpty());
  });
}

TEST(Upload, ACheckpointThatIsReplacedMeanwhileIsAConflict) {
  const auto source = memory_store();
  save_step(source, 1);
  const auto target = memory_store();
  UploadOptions options;
  options.progress = [&](const Progress& progress) {
    if (progress.done < progress.total) return;
    auto metadata = read_all(*source->open(".metadata"), 1 << 20);
    metadata[metadata.size() - 40] ^= std::byte{1};
    put(*source, ".metadata", metadata, IfExists::replace);
  };
  EXPECT_EQ(code_of([&] { (void)upload(source, target, options); }), ErrorCode::conflict);
  EXPECT_THAT(contents_of(*target), IsEmpty());
}

TEST(Upload, WhatCannotBeMeantIsRefused) {
  const auto target = memory_store();
  const std::string source = written(CheckpointKind::olmo_full);
  EXPECT_EQ(code_of([&] { (void)upload(source, target, {.threads = 0}); }),
            ErrorCode::invalid_argument);
  EXPECT_EQ(code_of([&] { (void)upload(source, source + "/", {.overwrite = true}); }),
            ErrorCode::invalid_argument);
  EXPECT_EQ(code_of([&] { (void)upload(source, posix_store(source), {.overwrite = true}); }),
            ErrorCode::invalid_argument);
  EXPECT_EQ(code_of([&] { (void)upload(temporary_directory(), target); }), ErrorCode::incomplete);
  EXPECT_EQ(code_of([&] { (void)upload(source, "hdfs://host/x"); }), ErrorCode::unsupported);
  EXPECT_EQ(code_of([&] { (void)upload(source, {target, "../x"}); }), ErrorCode::unsafe);
  EXPECT_THAT(contents_of(*target), IsEmpty());
}

}  // namespace
}  // namespace tessera
