// Copies: checkpoint-rows O-08, OQ-08; fault-rows C08, O26.
#include "tessera/copy.h"

#include <gmock/gmock.h>
#include <sys/stat.h>

#include <array>
#include <filesystem>
#include <span>

#include "base/parallel.h"
#include "base/text.h"
#include "checkpoint/run/steps.h"
#include "checkpoint/run/testing.h"
#include "conformance/temporary_directory.h"
#include "conformance/unprivileged.h"
#include "format/dcp/dcp.h"
#include "tessera/verify.h"

namespace tessera {
namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)
using ::testing::IsEmpty;
TEST(Copy, EveryKindArrivesAsItIsAndIsThenWhole_O08) {
  for (const CheckpointKind kind : marked_kinds()) {
    SCOPED_TRACE(to_string(kind));
    const Contents wanted = contents_of(*posix_store(written(kind)));
    const auto target = memory_store();
    const CopyReport first = copy(written(kind), target, {.read_back = true});
    EXPECT_EQ(contents_of(*target), wanted);
    EXPECT_EQ(first.files, wanted.size());
    EXPECT_EQ(first.whole_files, 0U);
    const CopyReport again = copy(written(kind), target);
    EXPECT_EQ(again.whole_files, wanted.size());
    EXPECT_EQ(again.whole_bytes, first.bytes);
    EXPECT_THAT(verify(target).findings, IsEmpty());
  }
}

// As if the process was killed at each of its changes of the target.
TEST(Copy, WhereverItDiesTheNextOneGoesOn_O26_OQ08) {
  for (const CheckpointKind kind : {CheckpointKind::dcp, CheckpointKind::olmo_torch_new}) {
    const Contents wanted = contents_of(*posix_store(written(kind)));
    std::uint64_t calls = 0;
    std::uint64_t went_on = 0;
    bool has_died = true;
    for (; has_died; ++calls) {
      const auto target = memory_store();
      const auto dying = std::make_shared<DyingStore>(target, calls);
      has_died = false;
      try {
        (void)copy(written(kind), dying, {.threads = 1});
      } catch (const Error&) {
        has_died = true;
      }
      if (kind == CheckpointKind::dcp && is_marked(*target)) {
        EXPECT_EQ(contents_of(*target), wanted) << calls;
      }
      const CopyReport report = copy(written(kind), target);
      went_on += report.whole_files;
      EXPECT_EQ(contents_of(*target), wanted) << calls;
    }
    EXPECT_GT(calls, wanted.size());
    EXPECT_GT(went_on, wanted.size());
  }
}

TEST(Copy, OneThatIsStoppedLeavesNoMarkerAndWhatIsWhole) {
  const auto target = memory_store();
  std::stop_source stop;
  CopyOptions options{.threads = 1, .stop = stop.get_token()};
  options.progress = [&](const Progress& progress) {
    if (progress.done > 0) stop.request_stop();
  };
  const Error error = error_of([&] { (void)copy(written(CheckpointKind::dcp), target, options); });
  EXPECT_EQ(error.code(), ErrorCode::cancelled);
  EXPECT_FALSE(is_marked(*target));
}

TEST(Copy, ACheckpointThatIsBeingWrittenIsIncomplete_C08) {
  for (const CheckpointKind kind : marked_kinds()) {
    SCOPED_TRACE(to_string(kind));
    const auto live = memory_store(), target = memory_store();
    copy_objects(posix_store(written(kind)), *live);
    live->remove(kind == CheckpointKind::dcp ? ".metadata" : "config.yaml");
    EXPECT_EQ(code_of([&] { (void)copy(live, target); }), ErrorCode::incomplete);
    EXPECT_THAT(target->list(), IsEmpty());
  }
}

TEST(Copy, DamagedFilesOfTheTargetAreCopiedAgainAndOfTheSourceRefused) {
  const auto source = memory_store();
  copy_objects(posix_store(written(CheckpointKind::dcp)), *source);
  const Contents wanted = contents_of(*source);
  for (const auto& [name, content] : wanted) {
    if (!name.ends_with(".distcp")) continue;
    const auto target = memory_store();
    (void)copy(source, target);
    std::vector<std::byte> damaged = content;
    damaged[damaged.size() / 2] ^= std::byte{1};
    put(*target, name, damaged, IfExists::replace);
    EXPECT_EQ(copy(source, target).whole_files, wanted.size() - 1);
    EXPECT_EQ(contents_of(*target), wanted);

    const auto bad = memory_store(), nothing = memory_store();
    copy_objects(source, *bad);
    put(*bad, name, damaged, IfExists::replace);
    EXPECT_EQ(code_of([&] { (void)copy(bad, nothing); }), ErrorCode::corrupt);
    EXPECT_FALSE(is_marked(*nothing));
  }
}

// PyTorch's, which has no digests that would tell.
TEST(Copy, ADcpCheckpointThatLacksAFileOrItsEndIsIncomplete) {
  namespace fs = std::filesystem;
  const std::string golden =
      std::string(TESSERA_TEST_DATA) + "/golden/fsdp1_uop1_ws2/model_and_optim";
  const auto damages = std::to_array<void (*)(const std::string&)>({
      [](const std::string& file) { fs::remove(file); },
      [](const std::string& file) { fs::resize_file(file, fs::file_size(file) - 1); },
      [](const std::string& file) {
        fs::remove(file);
        fs::create_symlink("nowhere", file);
      },
      [](const std::string& file) {
        fs::remove(file);
        ASSERT_EQ(::mkfifo(file.c_str(), 0600), 0);
      },
  });
  for (std::size_t i = 0; i < damages.size(); ++i) {
    SCOPED_TRACE(i);
    const std::string damaged = copy_of(golden);
    damages[i](damaged + "/__1_0.distcp");
    const auto target = memory_store();
    EXPECT_THROW((void)copy(damaged, target, {.read_back = true}), Error);
    EXPECT_THAT(target->list(), IsEmpty());
    (void)copy(damaged, target, {.allow_incomplete = true});
    EXPECT_TRUE(is_marked(*target));
  }
}

// Copies are of bytes: a config of an OLMo that is not known here is one, too.
TEST(Copy, AConfigOfNoKnownKindComesWithWhatLiesThere) {
  const auto source = memory_store(), target = memory_store();
  for (const char* name : {"config.yaml", "weights.npz", "state/rank0"})
    put(*source, name, std::as_bytes(std::span(std::string_view("x: 1"))), IfExists::fail);
  EXPECT_EQ(copy(source, target).files, 3U);
  EXPECT_EQ(contents_of(*target), contents_of(*source));
  // One that is known, and not whole.
  const auto damaged = memory_store(), nothing = memory_store();
  copy_objects(posix_store(written(CheckpointKind::olmo_legacy)), *damaged);
  damaged->remove("rank1.pt");
  EXPECT_EQ(code_of([&] { (void)copy(damaged, nothing); }), ErrorCode::incomplete);
  EXPECT_THAT(nothing->list(), IsEmpty());
}

// At the root of a volume there is a directory that root alone may read.
TEST(Copy, WhatIsClosedAndNotTheCheckpointsIsPassedOver) {
  const TemporaryDirectory temporary;
  std::filesystem::permissions(temporary.path(), std::filesystem::perms(0755));
  const std::string directory = temporary.path() + "/volume", other = temporary.path() + "/other";
  for (const std::string& of : {directory, other}) {
    std::filesystem::create_directory(of);
    Unprivileged::give(of);
  }
  const ClosedDirectory closed(directory + "/lost+found"), closed_too(other + "/lost+found");
  const Unprivileged unprivileged;
  save_step(directory, 1);
  const auto target = memory_store();
  EXPECT_EQ(copy(directory, target).files, 3U);
  EXPECT_EQ(contents_of(*target), contents_of(*posix_store(directory)));
  (void)upload(directory, memory_store());
  EXPECT_EQ(copy(directory, other).files, 3U);
  EXPECT_THAT(verify(other).findings, IsEmpty());
}

// A closed directory that has files of the checkpoint hides a part of it.
TEST(Copy, WhatIsClosedAndTheCheckpointsIsAnError) {
  const TemporaryDirectory temporary;
  const std::string& root = temporary.path();
  std::filesystem::permissions(root, std::filesystem::perms(0755));
  copy_objects(posix_store(written(CheckpointKind::olmo_local)), *posix_store(root + "/local"));
  ASSERT_FALSE(posix_store(root + "/local")->list("model").empty());
  for (const char* name : {"/config.yaml", "/shards/x"}) {
    std::filesystem::create_directories(root + "/dcp/shards");
    write_text(root + "/dcp" + name, "x");
  }
  write_text(root + "/dcp/.metadata", [] {
    dcp::Metadata metadata;
    metadata.entries.resize(1);
    dcp::Entry& entry = metadata.entries[0];
    entry.name = "n";
    entry.item = {"shards/x", 0, 1, {}};
    const std::vector<std::byte> bytes = dcp::encode(metadata);
    return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  }());
  std::filesystem::permissions(root + "/local/model", std::filesystem::perms::none);
  std::filesystem::permissions(root + "/dcp/shards", std::filesystem::perms::none);
  {
    const Unprivileged unprivileged;
    for (const char* of : {"/local", "/dcp"}) {
      EXPECT_EQ(code_of([&] { (void)copy(root + of, memory_store()); }), ErrorCode::io) << of;
      EXPECT_EQ(code_of([&] { (void)upload(root + of, memory_store()); }), ErrorCode::io) << of;
    }
    const auto local = posix_store(root + "/local");
    EXPECT_EQ(code_of([&] { remove_markers_first(*local); }), ErrorCode::io);
    EXPECT_TRUE(is_marked(*local));
  }
  for (const char* of : {"/local/model", "/dcp/shards"})
    std::filesystem::permissions(root + of, std::filesystem::perms::owner_all);
}

// Reads as from a server: a stop ends it, unless it settles what became of a commit.
class StoppedSource final : public ByteSource {
 public:
  StoppedSource(std::shared_ptr<ByteSource> source, std::stop_source& stop, bool answers)
      : source_(std::move(source)), stop_(stop), answers_(answers) {}
  [[nodiscard]] std::uint64_t size() const override { return source_->size(); }
  [[nodiscard]] const std::string& name() const override { return source_->name(); }
  void read_at(std::uint64_t offset, MutableByteView out) const override {
    stop_.request_stop();
    parallel_for(2, 2, [&](std::size_t) {
      if (HeedStop::is_requested() && !(answers_ && Settling::is_under_way())) throw_cancelled();
    });
    source_->read_at(offset, out);
  }

 private:
  const std::shared_ptr<ByteSource> source_;
  std::stop_source& stop_;
  const bool answers_;
};

class StoppedStore final : public testing_support::ForwardingStore {
 public:
  StoppedStore(std::shared_ptr<Store> inner, std::stop_source& stop, bool answers)
      : ForwardingStore(std::move(inner)), stop_(stop), answers_(answers) {}
  [[nodiscard]] std::shared_ptr<ByteSource> open(std::string_view name) const override {
    auto source = ForwardingStore::open(name);
    if (!is_one_of(name, ".metadata", "config.yaml")) return source;
    return std::make_shared<StoppedSource>(std::move(source), stop_, answers_);
  }

 private:
  std::stop_source& stop_;
  const bool answers_;
};

// What is told then is what is there.
TEST(Copy, AStopWhileAMarkerIsReadAgainIsNoCancelledCopy) {
  for (const CheckpointKind kind : {CheckpointKind::dcp, CheckpointKind::olmo_torch_new}) {
    for (const bool answers : {true, false}) {
      const auto target = memory_store();
      std::stop_source stop;
      const auto stopped = std::make_shared<StoppedStore>(target, stop, answers);
      const auto copy_there = [&] {
        (void)copy(written(kind), stopped, {.read_back = true, .stop = stop.get_token()});
      };
      if (answers) {
        copy_there();
        EXPECT_EQ(contents_of(*target), contents_of(*posix_store(written(kind))));
      } else {
        EXPECT_EQ(code_of(copy_there), ErrorCode::timeout);
      }
      EXPECT_TRUE(stop.stop_requested());
    }
  }
}

TEST(Copy, AnotherCheckpointStaysUnlessItIsOverwritten_O08) {
  const auto target = memory_store(), other = memory_store();
  save_step(other, 1);
  (void)copy(other, target);
  const Contents before = contents_of(*target);
  EXPECT_EQ(code_of([&] { (void)copy(written(CheckpointKind::dcp), target); }),
            ErrorCode::already_exists);
  EXPECT_EQ(contents_of(*target), before);
  (void)copy(written(CheckpointKind::dcp), target, {.overwrite = true});
  EXPECT_EQ(contents_of(*target), contents_of(*posix_store(written(CheckpointKind::dcp))));
}

TEST(Copy, ADamagedPartBesideAWholeCheckpointIsInNobodysWay) {
  const std::string directory = temporary_directory() + "/c";
  save_step(directory, 1);
  for (const std::string& damaged :
       {std::string(), text_of(directory + "/.metadata").substr(0, 99)}) {
    write_text(directory + "/__0.metadata", damaged);
    (void)copy(directory, memory_store());
    (void)save(Checkpoint::open(directory).load(), directory, {.overwrite = true});
    EXPECT_THAT(verify(directory).findings, IsEmpty());
  }
}

TEST(Copy, ADamagedCheckpointOfARunDoesNotKeepTheOthers) {
  const auto run = memory_store(), target = memory_store(), saved = memory_store();
  save_step(saved, 1);
  for (const std::int64_t step : {3, 12, 20})
    copy_objects(saved, *run, run_checkpoint_name(step) + "/");
  for (const ObjectInfo& object : run->list("step3"))
    if (object.name.ends_with(".distcp")) run->remove(object.name);
  EXPECT_EQ(code_of([&] { (void)copy(run, target); }), ErrorCode::incomplete);
  EXPECT_EQ(run_checkpoints(target).size(), 2U);
}

TEST(Copy, AFileKeepsItsSealAndTakesNoOther) {
  const std::string work = temporary_directory();
  const std::string golden = std::string(TESSERA_TEST_DATA) + "/golden/c2_hf_cons/model-0000";
  std::filesystem::copy_file(golden + "1-of-00002.safetensors", work + "/a.safetensors");
  (void)seal(work + "/a.safetensors");
  const auto store = memory_store();
  EXPECT_EQ(copy(work + "/a.safetensors", {store, "x/b.safetensors"}).files, 2U);
  EXPECT_TRUE(store->exists("x/b.safetensors.tessera.json"));
  std::filesystem::create_directory(work + "/d");
  (void)copy({store, "x/b.safetensors"}, work + "/d");
  EXPECT_TRUE(seal(work + "/d/b.safetensors").was_sealed);
  // A side file cannot have every name, and then there is no copy that lacks it.
  EXPECT_EQ(code_of([&] {
              (void)copy(work + "/a.safetensors", {store, "x/\xff.safetensors"});
            }),
            ErrorCode::unsupported);
  EXPECT_FALSE(store->exists("x/\xff.safetensors"));
  // Without digests and with other bytes.
  std::filesystem::copy_file(golden + "2-of-00002.safetensors", work + "/plain.safetensors");
  EXPECT_EQ(code_of([&] {
              (void)copy(work + "/plain.safetensors", {store, "x/b.safetensors"});
            }),
            ErrorCode::already_exists);
  (void)copy(work + "/plain.safetensors", {store, "x/b.safetensors"}, {.overwrite = true});
  EXPECT_FALSE(store->exists("x/b.safetensors.tessera.json"));
  EXPECT_EQ(code_of([&] { (void)copy(work + "/plain.safetensors", work + "/plain.safetensors"); }),
            ErrorCode::invalid_argument);
}

// Another file and its seal take their places between two looks.
class ReplacedFile final : public testing_support::ForwardingStore {
 public:
  ReplacedFile(const std::string& directory, std::string rival)
      : ForwardingStore(posix_store(directory)), directory_(directory), rival_(std::move(rival)) {}
  [[nodiscard]] std::shared_ptr<ByteSource> open(std::string_view name) const override {
    auto source = ForwardingStore::open(name);
    if (name == "a.safetensors" && std::exchange(has_seen_seal_, false)) {
      for (const ObjectInfo& object : posix_store(rival_)->list())
        std::filesystem::rename(rival_ + "/" + object.name, directory_ + "/" + object.name);
    }
    if (name == "a.safetensors.tessera.json") has_seen_seal_ = true;
    return source;
  }

 private:
  std::string directory_, rival_;
  mutable bool has_seen_seal_ = false;
};

TEST(Copy, AFileThatIsReplacedMeanwhileGetsNoOtherSeal) {
  const std::string golden = std::string(TESSERA_TEST_DATA) + "/golden/c2_hf_cons/model-0000";
  for (const char* name : {"a.safetensors", "b.safetensors"}) {
    const std::string directory = temporary_directory();
    const std::string rival = temporary_directory();
    for (const auto& [there, number] : {std::pair(directory, 1), std::pair(rival, 2)}) {
      std::filesystem::copy_file(golden + std::to_string(number) + "-of-00002.safetensors",
                                 there + "/a.safetensors");
      (void)seal(there + "/a.safetensors");
    }
    const auto target = memory_store();
    const auto from = std::make_shared<ReplacedFile>(directory, rival);
    EXPECT_EQ(code_of([&] {
                (void)copy({from, "a.safetensors"}, {target, name});
              }),
              ErrorCode::conflict);
    EXPECT_THAT(target->list(), IsEmpty());
  }
}

TEST(Copy, ARunComesWithAllItsWholeCheckpoints) {
  const auto run = memory_store(), target = memory_store();
  const auto saved = memory_store();
  save_step(saved, 1);
  for (const std::int64_t step : {3, 12})
    copy_objects(saved, *run, run_checkpoint_name(step) + "/");
  put(*run, "step20/__0_0_0123456789ab.distcp", {}, IfExists::fail);  // a save that goes on
  go_on_from(run, 3);
  Contents wanted = contents_of(*run);
  wanted.erase("step20/__0_0_0123456789ab.distcp");
  EXPECT_EQ(copy(run, target).checkpoints, 2U);
  EXPECT_EQ(contents_of(*target), wanted);
  EXPECT_EQ(latest_checkpoint(target).found->step, 3);
}

}  // namespace
}  // namespace tessera
