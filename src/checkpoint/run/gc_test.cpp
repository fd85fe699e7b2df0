#include "tessera/run_directory.h"

#include <chrono>
#include <filesystem>
#include <random>
#include <span>

#include <gmock/gmock.h>

#include "checkpoint/dcp/guard_dcp.h"
#include "checkpoint/dcp/read_catalog.h"
#include "checkpoint/read/guard.h"
#include "checkpoint/read/tail.h"
#include "checkpoint/run/testing.h"
#include "conformance/temporary_directory.h"
#include "conformance/unprivileged.h"
#include "storage/posix/replaced_directory.h"
#include "tessera/copy.h"
#include "tessera/data_files.h"

namespace tessera {

// What killed writers left: fault-rows C06, O25, O26.

namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)
using ::testing::ElementsAre;
using ::testing::IsEmpty;
namespace fs = std::filesystem;

void make_old(const std::string& path) {
  fs::last_write_time(path, fs::file_time_type::clock::now() - std::chrono::hours(48));
}

std::vector<std::string> names_of(const GcReport& report, const std::string& below) {
  std::vector<std::string> names;
  for (const Leftover& leftover : report.leftovers)
    names.push_back(leftover.path.substr(below.size() + 1));
  return names;
}

// A run with one checkpoint, and with what kills leave; two days old.
std::string littered() {
  const std::string run = temporary_directory() + "/run";
  save_step(run + "/step1", 1);
  for (const char* made :
       {"/step2", "/step3-tmp-0123456789ab", "/notes-tmp-march", "/notes-tmp-0123456789ab",
        "/.q.resume/new", "/.mine.resume", "/step8", "/logs", "/.git/refs",
        "/.tessera-writer-0123456789ab-7", "/.tessera-writer-0123456789ab-mine"})
    fs::create_directories(run + made);
  for (const char* left : {"/step1/__0_0_0123456789ab.distcp", "/step1/tessera-0123456789ab.probe",
                           "/step1/.x.pt.tmp-0123456789ab", "/step2/__3_1_0123456789ab.distcp",
                           "/step3-tmp-0123456789ab/model.pt", "/.q.resume/new/model.pt",
                           "/.tessera-writer-0123456789ab-7/up-1-2"}) {
    write_text(run + left, "left");
  }
  (void)WorkDirectory(run + "/.q.resume");
  for (const char* mine : {"/notes-tmp-0123456789ab/a.txt", "/.mine.resume/a.txt",
                           "/.mine.resume/lock", "/.tessera-writer-0123456789ab-mine/alive-0-1"})
    write_text(run + mine, "a user's");
  write_text(run + "/step2/__0_0.distcp", "of another writer");
  write_text(run + "/notes-tmp-march/a.txt", "a user's");
  for (const auto& entry : fs::recursive_directory_iterator(run)) make_old(entry.path().string());
  return run;
}

TEST(Gc, FindsWhatKillsLeaveAndNothingElse_O26) {
  const std::string run = littered();
  const std::vector<std::string> wanted{".q.resume",
                                        ".tessera-writer-0123456789ab-7",
                                        "step1/.x.pt.tmp-0123456789ab",
                                        "step1/__0_0_0123456789ab.distcp",
                                        "step1/tessera-0123456789ab.probe",
                                        "step2/__3_1_0123456789ab.distcp",
                                        "step3-tmp-0123456789ab",
                                        "step8"};
  const GcReport listed = gc(run);
  EXPECT_EQ(names_of(listed, run), wanted);
  for (const Leftover& leftover : listed.leftovers) {
    EXPECT_EQ(leftover.bytes, leftover.path == run + "/step8"       ? 0U
                              : leftover.path == run + "/.q.resume" ? 4U + 28U
                                                                    : 4U);
    EXPECT_GE(leftover.age->count(), 47 * 3600);
    EXPECT_FALSE(leftover.removed);
    EXPECT_TRUE(fs::exists(leftover.path));
  }
  EXPECT_THAT(gc(run, {.older_than = std::chrono::hours(72)}).leftovers, IsEmpty());
  const GcReport removed = gc(run, {.remove = true});
  EXPECT_EQ(names_of(removed, run), wanted);
  for (const Leftover& leftover : removed.leftovers) {
    EXPECT_TRUE(leftover.removed) << leftover.problem;
    EXPECT_FALSE(fs::exists(leftover.path));
  }
  EXPECT_TRUE(fs::exists(run + "/step2/__0_0.distcp"));
  // Names alone say nothing.
  for (const char* mine :
       {"/notes-tmp-march/a.txt", "/notes-tmp-0123456789ab/a.txt", "/.mine.resume/a.txt", "/logs",
        "/.git/refs", "/.tessera-writer-0123456789ab-mine/alive-0-1"})
    EXPECT_TRUE(fs::exists(run + mine)) << mine;
  EXPECT_THAT(verify(run + "/step1").findings, IsEmpty());
  EXPECT_THAT(gc(run).leftovers, IsEmpty());
}

TEST(Gc, WhatIsBesideADirectoryToBecomeItIsFound) {
  const std::string run = littered();
  fs::create_directory(run + "/step3");
  EXPECT_THAT(names_of(gc(run + "/step3"), run), ElementsAre("step3-tmp-0123456789ab"));
  fs::create_directory(run + "/q");
  EXPECT_THAT(names_of(gc(run + "/q"), run), ElementsAre(".q.resume"));
}

TEST(Gc, AWriterThatLivesKeepsItsFiles_C06) {
  const std::string run = littered();
  const auto store = posix_store(run);
  const auto made = store->new_directory("step9", IfExists::fail);
  write_text(run + "/" + made->working() + "/model.pt", "live");
  const auto held = store->hold("step2");
  const auto also_held = store->hold("step8");
  const WorkDirectory resumed(run + "/.q.resume");
  const GcReport report = gc(run, {.remove = true, .older_than = std::chrono::seconds(0)});
  EXPECT_TRUE(fs::exists(run + "/" + made->working() + "/model.pt"));
  EXPECT_TRUE(fs::exists(run + "/step2/__3_1_0123456789ab.distcp"));
  EXPECT_TRUE(fs::exists(run + "/.q.resume/new/model.pt"));
  EXPECT_TRUE(fs::exists(run + "/step8"));
  EXPECT_EQ(report.spared, 4U);
  EXPECT_FALSE(fs::exists(run + "/step3-tmp-0123456789ab"));
}

// Whoever names a store means the same directories.
TEST(Gc, WhatAStoreOfADiskHasNotFinishedKeepsItsFiles_C06) {
  const std::string run = littered();
  const auto store = posix_store(run);
  const auto made = store->new_directory("step9", IfExists::fail);
  const std::string live = made->working() + "/model_and_optim/__0_0_0123456789ab.distcp";
  put(*store, live, {}, IfExists::fail);
  make_old(run + "/" + live);
  const GcReport report = gc(store, {.remove = true});
  EXPECT_TRUE(fs::exists(run + "/" + live));
  EXPECT_FALSE(fs::exists(run + "/step2/__3_1_0123456789ab.distcp"));
}

// Who makes a checkpoint of links to another one's files begins with those.
TEST(Gc, ALinkIsAsOldAsItself) {
  const std::string run = temporary_directory();
  fs::create_directory(run + "/step1");
  write_text(run + "/step1/old", "another checkpoint's");
  make_old(run + "/step1/old");
  fs::create_directory(run + "/step2");
  fs::create_symlink("../step1/old", run + "/step2/__0_0_0123456789ab.distcp");
  for (const Location& where : {Location(run), Location(posix_store(run))}) {
    EXPECT_EQ(gc(where, {.remove = true}).spared, 1U);
    EXPECT_TRUE(fs::exists(run + "/step2/__0_0_0123456789ab.distcp"));
  }
}

TEST(Gc, WhatWasReplacedIsAsOldAsWhatReplacedIt) {
  const std::string directory = temporary_directory();
  save_step(directory, 1);
  for (const ObjectInfo& object : posix_store(directory)->list())
    make_old(directory + "/" + object.name);
  Value tree = Value::dict();
  tree.set_item("step", std::int64_t{2});
  SaveOptions options;
  options.overwrite = true;
  (void)save(tree, directory, options);
  EXPECT_THAT(gc(directory).leftovers, IsEmpty());
  EXPECT_GT(gc(directory).spared, 0U);
  make_old(directory + "/.metadata");
  EXPECT_FALSE(gc(directory).leftovers.empty());
}

// Has no locks, and its checkpoint is replaced when somebody looks at it.
class RivalledStore final : public testing_support::ForwardingStore {
 public:
  RivalledStore(const std::string& directory, std::string rival)
      : ForwardingStore(posix_store(directory)), directory_(directory), rival_(std::move(rival)) {}
  [[nodiscard]] std::shared_ptr<ByteSource> open(std::string_view name) const override {
    if (name == kDcpMetadata && !std::exchange(is_replaced_, true))
      fs::copy(rival_, directory_,
               fs::copy_options::recursive | fs::copy_options::overwrite_existing);
    return ForwardingStore::open(name);
  }
  [[nodiscard]] std::unique_ptr<StoreHold> hold(std::string_view /*directory*/) override {
    return nullptr;
  }

 private:
  std::string directory_, rival_;
  mutable bool is_replaced_ = false;
};

TEST(Gc, WhatIsReplacedMeanwhileIsAsOldAsWhatReplacedIt) {
  const std::string old = temporary_directory();
  const std::string rival = temporary_directory();
  save_step(old, 1);
  save_step(rival, 2);
  const std::vector<ObjectInfo> objects = posix_store(old)->list();
  for (const ObjectInfo& object : objects) make_old(old + "/" + object.name);
  const Location where(std::make_shared<RivalledStore>(old, rival));
  const GcReport report = gc(where, {.remove = true});
  EXPECT_THAT(report.leftovers, IsEmpty());
  EXPECT_EQ(report.spared, 2U);
  for (const ObjectInfo& object : objects) EXPECT_TRUE(fs::exists(old + "/" + object.name));
}

const GcOptions kAtOnce{.remove = true, .older_than = std::chrono::seconds(0)};

std::vector<std::string> objects_in(const std::string& directory) {
  std::vector<std::string> names;
  for (const ObjectInfo& object : posix_store(directory)->list()) names.push_back(object.name);
  return names;
}

TEST(Gc, RanksWithoutDataLeaveNoFileThatCouldBeTakenForALeftover) {
  const std::string root = temporary_directory();
  save_step(root + "/one", 1, 2);
  ConvertOptions options;
  options.to = CheckpointKind::dcp;
  options.ranks = 40;
  (void)convert(root + "/one", root + "/c", options);
  EXPECT_THAT(objects_in(root + "/c"), ::testing::SizeIs(4));  // rows of two ranks
  EXPECT_THAT(names_of(gc(root + "/c", kAtOnce), root + "/c"), IsEmpty());
  EXPECT_THAT(verify(root + "/c").findings, IsEmpty());
}

// As conversions wrote them for ranks without data: with a tail alone, and in the digests alone.
std::string with_empty_data_file(const std::string& directory) {
  const auto store = posix_store(directory);
  const std::string name = "__39_0_0123456789ab.distcp";
  TailedSink sink(store->create(name, IfExists::fail));
  const DataDigest digest = sink.finish();
  sink.commit();
  const std::string side_file_of = side_file_name(save_id_of(*store, read_dcp_metadata(*store)));
  SideFile side_file = read_side_file(*store, side_file_of);
  side_file.files[name] = {digest.size, {}, 0, digest.tail};
  const std::string text = encode_side_file(side_file);
  put(*store, side_file_of, std::as_bytes(std::span(text)), IfExists::replace);
  return name;
}

TEST(Gc, AFileThatOnlyTheDigestsNameBelongsToTheCheckpointAndDoesNotStopAReader) {
  const std::string directory = temporary_directory() + "/c";
  save_step(directory, 1);
  const std::string empty = with_empty_data_file(directory);
  const std::vector<std::string> before = objects_in(directory);
  EXPECT_THAT(names_of(gc(directory, kAtOnce), directory), IsEmpty());
  EXPECT_EQ(objects_in(directory), before);
  EXPECT_THAT(verify(directory).findings, IsEmpty());
  (void)copy(directory, directory + "-copy");
  EXPECT_EQ(objects_in(directory + "-copy"), before);
  posix_store(directory)->remove(empty);  // as earlier versions did
  EXPECT_THAT(verify(directory).findings, IsEmpty());
  (void)copy(directory, directory + "-again");
  EXPECT_THAT(verify(directory + "-again").findings, IsEmpty());
}

TEST(Gc, PartsOfASaveWithoutCollectivesBelongToTheirCheckpoint_P04) {
  const std::string directory = temporary_directory() + "/parts";
  const auto saved = [&] {
    for (int rank = 0; rank < 2; ++rank) {
      Value tree = Value::dict();
      tree.set_item("weight", Value(counting({4, 8}, chunk({4, 8}, rank, 2), 0)));
      save_part(tree, directory, rank, {.overwrite = true});
    }
  };
  saved();
  const std::vector<std::string> before = objects_in(directory);
  EXPECT_THAT(names_of(gc(directory, kAtOnce), directory), IsEmpty());
  EXPECT_EQ(objects_in(directory), before);
  EXPECT_THAT(verify(directory).findings, IsEmpty());
  saved();  // the files before these are still there
  EXPECT_THAT(gc(directory, kAtOnce).leftovers, ::testing::SizeIs(2));
  EXPECT_THAT(objects_in(directory), ::testing::SizeIs(before.size()));
  EXPECT_THAT(verify(directory).findings, IsEmpty());
}

// Draws checkpoints and what killed writers leave in them.
class Drawn {
 public:
  explicit Drawn(std::uint32_t seed) : random_(seed) {}

  // A checkpoint of any kind that is a directory; returns where it is.
  std::string checkpoint() {
    const std::string root = temporary_directory(), made = root + "/made", where = root + "/c";
    const std::size_t turns = 1 + below(3);
    const std::size_t kind = below(5);
    for (std::size_t turn = 0; turn < turns; ++turn) {
      if (kind == 0) return copy_of(written(marked_kinds()[below(marked_kinds().size())]));
      if (kind == 1) {
        (void)save(tree(0, 1), where,
                   {.overwrite = true, .threads = 1 + static_cast<int>(below(3))});
      } else if (kind == 2) {
        save_parts(where);
      } else {
        (void)save(tree(0, 1), made, {.overwrite = true});
        ConvertOptions options;
        options.to = kind == 3 ? CheckpointKind::dcp : CheckpointKind::safetensors;
        options.ranks = kind == 3 ? 1 + static_cast<int>(below(40)) : 1;
        options.max_shard_size = kind == 3 ? 0 : 200;
        options.overwrite = true;
        (void)convert(made, where, options);
      }
    }
    return where;
  }

  // Names that only killed writers leave.
  void litter(const std::string& directory) {
    for (const char* name : {"__0_0_0123456789ab.distcp", "__77_3_ba9876543210.distcp",
                             "tessera-0123456789ab.probe", ".model.pt.tmp-0123456789ab"}) {
      if (below(2) == 0) write_text(directory + "/" + name, "left");
    }
  }

 private:
  std::size_t below(std::size_t limit) { return random_() % limit; }

  // Some tensors are empty, and some have fewer rows than there are ranks.
  Value tree(int rank, int ranks) {
    Value tree = Value::dict();
    tree.set_item("step", std::int64_t{3});
    std::mt19937 shapes(shape_seed_);
    for (std::size_t i = shapes() % 4; i > 0; --i) {
      const Shape shape{static_cast<std::int64_t>(shapes() % 6),
                        1 + static_cast<std::int64_t>(shapes() % 9)};
      Tensor tensor = counting(shape, chunk(shape, rank, ranks), 0);
      tensor.sharded = ranks > 1;
      tree.set_item("t" + std::to_string(i), Value(std::move(tensor)));
    }
    return tree;
  }

  void save_parts(const std::string& where) {
    const int ranks = 1 + static_cast<int>(below(8));
    shape_seed_ = random_();
    for (int rank = 0; rank < std::max(ranks, most_parts_); ++rank)
      save_part(tree(rank, std::max(ranks, most_parts_)), where, rank, {.overwrite = true});
    most_parts_ = std::max(ranks, most_parts_);
  }

  std::mt19937 random_;
  std::uint32_t shape_seed_ = random_();
  int most_parts_ = 0;
};

std::vector<std::string> findings_of(const std::string& directory) {
  std::vector<std::string> told;
  const VerifyReport report = verify(directory);
  for (const Finding& finding : report.findings) told.push_back(finding.text);
  told.push_back(std::to_string(report.tensors) + " tensors, " + std::to_string(report.bytes) +
                 " bytes");
  return told;
}

TEST(Gc, LeavesDrawnCheckpointsAsTheyAre) {
  for (std::uint32_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(seed);
    Drawn drawn(seed);
    const std::string directory = drawn.checkpoint();
    const std::vector<std::string> before = findings_of(directory);
    EXPECT_THAT(before, ::testing::SizeIs(1));
    drawn.litter(directory);
    for (const Leftover& leftover : gc(directory, kAtOnce).leftovers)
      EXPECT_TRUE(leftover.removed) << leftover.problem;
    EXPECT_EQ(findings_of(directory), before);
    fs::remove_all(directory);
  }
}

// What is closed to us we have not written.
TEST(Gc, ClosedDirectoriesDoNotKeepTheRest) {
  const TemporaryDirectory temporary;
  fs::permissions(temporary.path(), fs::perms(0755));
  const std::string run = temporary.path() + "/run";
  fs::create_directory(run);
  Unprivileged::give(run);
  const ClosedDirectory closed(run + "/lost+found");
  const Unprivileged unprivileged;
  save_step(run + "/step1", 1);
  write_text(run + "/step1/__0_0_0123456789ab.distcp", "left");
  const GcReport report = gc(run, {.remove = true, .older_than = std::chrono::seconds(0)});
  EXPECT_THAT(names_of(report, run), ElementsAre("step1/__0_0_0123456789ab.distcp"));
  EXPECT_FALSE(fs::exists(run + "/step1/__0_0_0123456789ab.distcp"));
  const ClosedDirectory itself(run + "/closed");
  EXPECT_EQ(code_of([&] { (void)gc(run + "/closed"); }), ErrorCode::io);
}

// One of a name that writers give, of another user.
TEST(Gc, AClosedDirectoryOfAWritersNameIsPassedOver) {
  const TemporaryDirectory temporary;
  fs::permissions(temporary.path(), fs::perms(0755));
  const std::string run = temporary.path() + "/run";
  fs::create_directory(run);
  Unprivileged::give(run);
  const ClosedDirectory closed(run + "/step1-tmp-0123456789ab");
  const Unprivileged unprivileged;
  save_step(run + "/step1", 1);
  EXPECT_THAT(gc(run, {.remove = true, .older_than = std::chrono::seconds(0)}).leftovers,
              IsEmpty());
  const auto made = posix_store(run)->new_directory("step1", IfExists::replace);
  EXPECT_TRUE(fs::exists(run + "/" + made->working()));
}

// The store tells no times and refuses to remove.
TEST(Gc, WhatCannotBeRemovedIsToldAndDoesNotKeepTheRest_O25) {
  const auto store = memory_store();
  const auto saved = memory_store();
  save_step(saved, 1);
  copy_objects(saved, *store, "step1/");
  for (const char* left : {"step1/__0_0_0123456789ab.distcp", "step2/__0_0_0123456789ab.distcp"})
    put(*store, left, {}, IfExists::fail);
  EXPECT_THAT(gc(store).leftovers, IsEmpty());
  const GcOptions now{.remove = true, .older_than = std::chrono::seconds(0)};
  const GcReport refused = gc(std::make_shared<DyingStore>(store, 0), now);
  ASSERT_EQ(refused.leftovers.size(), 2U);
  for (const Leftover& leftover : refused.leftovers) {
    EXPECT_FALSE(leftover.removed);
    EXPECT_NE(leftover.problem, "");
  }
  put(*store, "step3/.metadata", {}, IfExists::fail);  // damaged
  const GcReport report = gc(store, now);
  EXPECT_EQ(report.leftovers.size(), 3U);
  EXPECT_EQ(std::ranges::count(report.leftovers, true, &Leftover::removed), 2);
  EXPECT_EQ(code_of([&] { (void)gc_uploads(store); }), ErrorCode::unsupported);
  EXPECT_EQ(code_of([] { (void)gc(temporary_directory() + "/none"); }), ErrorCode::not_found);
}

}  // namespace
}  // namespace tessera
