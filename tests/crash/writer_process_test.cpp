// A CheckpointWriter whose saves are a process of its own, in one trainer.
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "checkpoint/background/job_message.h"
#include "checkpoint/background/process.h"
#include "checkpoint/background/snapshot.h"
#include "checkpoint/background/store_group.h"
#include "checkpoint/background/testing.h"
#include "checkpoint/open/arena_tree.h"
#include "conformance/unprivileged.h"
#include "five_kinds.h"
#include "storage/forwarding_store.h"
#include "tessera/checkpoint_writer.h"
#include "tessera/run_directory.h"

namespace tessera {
namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)
using namespace std::chrono_literals;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
namespace fs = std::filesystem;

WriterOptions by_process(WriterOptions options = {}) {
  options.process = true;
  options.idle = false;
  if (options.program.empty()) options.program = TESSERA_COMMAND;
  return options;
}

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

Value tree_of(float first) {
  return Value::dict({{"w", numbers(1000, first)}, {"step", 7}});
}

// The processes that this one has started and not yet buried.
std::vector<pid_t> children() {
  std::vector<pid_t> found;
  for (const auto& task : fs::directory_iterator("/proc/self/task")) {
    std::ifstream list(task.path() / "children");
    for (pid_t child = 0; list >> child;) found.push_back(child);
  }
  return found;
}

// This process may have so many bytes of addresses more, while it lives.
class AddressLimit {
 public:
  explicit AddressLimit(rlim_t more) {
    std::ifstream("/proc/self/statm") >> pages_;
    ::getrlimit(RLIMIT_AS, &before_);
    rlimit limit = before_;
    limit.rlim_cur = pages_ * static_cast<rlim_t>(::sysconf(_SC_PAGESIZE)) + more;
    EXPECT_EQ(::setrlimit(RLIMIT_AS, &limit), 0);
  }
  AddressLimit(const AddressLimit&) = delete;
  AddressLimit& operator=(const AddressLimit&) = delete;
  ~AddressLimit() { ::setrlimit(RLIMIT_AS, &before_); }

 private:
  rlim_t pages_ = 0;
  rlimit before_{};
};

std::vector<std::string> names_in(const std::string& directory) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(directory))
    names.push_back(entry.path().filename().string());
  return names;
}

TEST(WriterProcess, SavesWhatTheTreeWasAtTheCall) {
  const std::string run = temporary_directory();
  CheckpointWriter writer(by_process());
  for (int save = 0; save < 3; ++save) {
    Value tree = tree_of(static_cast<float>(save));
    const PendingSave pending = writer.save(tree, run + "/step" + std::to_string(save));
    EXPECT_TRUE(pending.staged());
    elements_of(tree, "w")[0] = -1;
    const SaveResult result = pending.result();
    EXPECT_FALSE(result.save_id.empty());
    EXPECT_GE(result.bytes_written, 4000U);
  }
  for (int save = 0; save < 3; ++save) {
    const auto saved = Checkpoint::open(run + "/step" + std::to_string(save));
    EXPECT_EQ(floats(saved.load().at("w").as_tensor()),
              floats(tree_of(static_cast<float>(save)).at("w").as_tensor()));
    EXPECT_EQ(saved.load().at("step").as_int(), 7);
  }
  EXPECT_THAT(names_in(run), ::testing::UnorderedElementsAre("step0", "step1", "step2"));
  EXPECT_EQ(children().size(), 1U);
}

// A number of kilobytes that the kernel tells of a process.
long kilobytes_of(pid_t process, const std::string& file, const std::string& field) {
  std::ifstream told("/proc/" + std::to_string(process) + "/" + file);
  for (std::string line; std::getline(told, line);)
    if (line.starts_with(field + ":")) return std::atol(line.c_str() + field.size() + 1);
  ADD_FAILURE() << file << " has no " << field;
  return 0;
}

// Trainer and process have the arena in common, of which each Pss has a half.
TEST(WriterProcess, MemoryStaysAsItIsOver200Saves) {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "what is measured here would be the sanitizer's memory";
#endif
  constexpr std::int64_t kCount = 1 << 20;  // 4 MiB
  const std::string directory = temporary_directory() + "/c";
  const Value tree = Value::dict({{"w", numbers(kCount, 0)}, {"text", std::string(1000, 'x')}});
  const pid_t trainer = ::getpid();
  const long before = kilobytes_of(trainer, "smaps_rollup", "Pss");
  CheckpointWriter writer(by_process());
  ASSERT_EQ(children().size(), 1U);
  const pid_t process = children().front();
  const auto own_of_process = [&] { return kilobytes_of(process, "status", "RssAnon"); };
  long after_20 = 0, most = 0;
  for (int i = 0; i < 200; ++i) {
    writer.save(tree, directory, replacing()).result();
    most = std::max(most, kilobytes_of(trainer, "smaps_rollup", "Pss") +
                              kilobytes_of(process, "smaps_rollup", "Pss"));
    if (i == 20) after_20 = own_of_process();
  }
  EXPECT_LE(most - before, (4 * kCount + (64 << 20)) / 1024);
  EXPECT_LE(own_of_process() - after_20, 8 << 10);
  ::testing::Test::RecordProperty("most_kib", std::to_string(most - before));
  ::testing::Test::RecordProperty("own_kib", std::to_string(own_of_process()));
}

// The same files as the thread's, but for ids, of every kind.
TEST(WriterProcess, WritesEveryKindAsTheThreadDoes) {
  const std::string run = temporary_directory();
  CheckpointWriter process(by_process()), thread(prompt());
  for (const CheckpointKind kind : testing::kFiveKinds) {
    const Value tree = testing::training_state(0, 1, 5);
    const SaveOptions options = testing::options_for_kind(kind, false);
    const std::string name = run + "/" + std::string(to_string(kind));
    process.save(tree, name + "-p", options).result();
    thread.save(tree, name + "-t", options).result();
    EXPECT_EQ(testing::number_of(testing::verified_state(name + "-p")), 5) << name;
    EXPECT_EQ(names_in(name + "-p").size(), names_in(name + "-t").size()) << name;
  }
  for (const char* file : {"model.pt", "model.safetensors"}) {
    const Value tree = Value::dict({{"a", numbers(100, 1)}, {"b", numbers(3, 7)}});
    process.save(tree, run + "/p/" + file).result();
    thread.save(tree, run + "/t/" + file).result();
    EXPECT_TRUE(read_file(run + "/p/" + file) == read_file(run + "/t/" + file)) << file;
  }
}

TEST(WriterProcess, TreesTravelWithAllThatTheyLeadTo) {
  const Value shared = numbers(12, 3);
  Tensor strided = shared.as_tensor();
  strided.shape = {3, 4};
  strided.pieces[0].slice = whole({3, 4});
  strided.pieces[0].strides = {1, 3};
  Tensor lazy = strided;
  lazy.pieces[0].neg = true;
  lazy.parameter = true;
  lazy.requires_grad = true;
  lazy.attributes = std::make_shared<const Value>(Value::dict({{"tag", "x"}}));
  Tensor placed = testing::flat_tensor({7, 3}, 1, 2, 9);
  Value stateful = Value::dict({{"k", shared}});
  stateful.set_container_state(Value::dict({{"_metadata", 1}}));
  Tensor empty;
  empty.shape = {0, 4};
  const Value tree = Value::dict({{"a", shared},
                                  {"b", Value::list({shared, Value(strided), Value(lazy)})},
                                  {"placed", Value(placed)},
                                  {"empty", Value(empty)},
                                  {"nothing", Value::dict()},
                                  {"stateful", stateful},
                                  {"stateful again", stateful},
                                  {"tuple", Value::tuple({1, 2.5, "text", Value()})},
                                  {"ordered", Value::dict({{"k", 1}}, DictKind::ordered_dict)}});
  Arena arena(0, 1, true);
  TreeSnapshot snapshot(tree);
  const Value copy = snapshot.take(arena, 1, nullptr);
  const Bytes message = message_of_tree(copy, arena.memory());
  Bytes elsewhere(arena.memory().begin(), arena.memory().end());
  const auto place = [&elsewhere](Storage& storage, std::uint64_t begin) {
    storage.data = elsewhere.data() + begin;
  };
  const Value read = tree_from_message(message, elsewhere.size(), place);
  EXPECT_EQ(message_of_tree(read, elsewhere), message);
  EXPECT_EQ(read.at("a").identity(), read.at("b").at(0).identity());
  EXPECT_EQ(read.at("a").as_tensor().pieces[0].storage,
            read.at("b").at(1).as_tensor().pieces[0].storage);
  EXPECT_EQ(read.at("placed").as_tensor().placement, placed.placement);
  ASSERT_NE(read.at("stateful").container_state(), nullptr);
  EXPECT_EQ(read.at("stateful").container_state()->at("_metadata").as_int(), 1);
  EXPECT_EQ(read.at("stateful").identity(), read.at("stateful again").identity());
  EXPECT_TRUE(read.at("b").at(2).as_tensor().pieces[0].neg);
  EXPECT_EQ(floats(read.at("b").at(1).as_tensor()), floats(strided));
}

// A scheduler that ends a job sends it to all of its processes; the trainer may save once more.
TEST(WriterProcess, GoesOnWhenItIsAskedToEnd_F27) {
  const std::string run = temporary_directory();
  CheckpointWriter writer(by_process());
  writer.save(tree_of(1), run + "/step1").result();
  for (const pid_t child : children()) ::kill(child, SIGTERM);
  std::this_thread::sleep_for(20ms);
  writer.save(tree_of(2), run + "/step2").result();
  writer.require_alive();
}

TEST(WriterProcess, TreesAsDeepAsAThreadSavesTravel) {
  Value tree = numbers(1, 4);
  for (int depth = 0; depth < 1999; ++depth) tree = Value::list({tree});
  Arena arena(0, 1, true);
  const Value copy = TreeSnapshot(tree).take(arena, 1, nullptr);
  Bytes elsewhere(arena.memory().begin(), arena.memory().end());
  (void)tree_from_message(message_of_tree(copy, arena.memory()), elsewhere.size(),
                          [](Storage& /*storage*/, std::uint64_t /*begin*/) {});
}

// The arena is another one, although it is as large as the one before.
TEST(WriterProcess, AnArenaThatCouldNotGrowIsMadeAnew) {
  const std::string run = temporary_directory();
  CheckpointWriter writer(by_process({.threads = 1}));
  writer.save(tree_of(1), run + "/a").result();
  Tensor large;
  large.shape = {std::int64_t{1} << 30};
  auto nowhere = std::make_shared<Storage>();
  nowhere->source = memory_source({}, "nothing");
  nowhere->size = std::uint64_t{1} << 32U;
  large.pieces.push_back({whole(large.shape), std::move(nowhere), 0, {}});
  {
    const AddressLimit limit(512U << 20U);
    const PendingSave failed = writer.save(Value::dict({{"w", large}}), run + "/b");
    EXPECT_EQ(code_of([&] { failed.result(); }), ErrorCode::io);
  }
  writer.save(tree_of(2), run + "/c").result();
  EXPECT_EQ(floats_at(run + "/c", "w"), floats(tree_of(2).at("w").as_tensor()));
}

// The directory above a place may be closed to who saves there.
TEST(WriterProcess, OneProcessNeedsNoMeeting) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs a user beside the owner of the directory";
  const std::string run = temporary_directory();
  fs::create_directory(run + "/mount");
  Unprivileged::give(run + "/mount");
  fs::permissions(run, fs::perms::owner_all | fs::perms::group_exec | fs::perms::others_exec |
                           fs::perms::others_read);
  const Unprivileged unprivileged;
  CheckpointWriter writer(by_process());
  SaveOptions options;
  options.overwrite = true;
  writer.save(tree_of(2), run + "/mount", options).result();
  EXPECT_EQ(floats_at(run + "/mount", "w"), floats(tree_of(2).at("w").as_tensor()));
}

TEST(WriterProcess, WhatCannotTravelIsRefused) {
  const std::string run = temporary_directory();
  CheckpointWriter writer(by_process());
  SaveOptions renamed;
  renamed.name = [](const std::string& key) { return key; };
  const auto code_of_save = [&](const Location& where, const SaveOptions& options) {
    const PendingSave pending = writer.save(tree_of(1), where, options);
    EXPECT_FALSE(pending.staged());
    return code_of([&] { pending.result(); });
  };
  EXPECT_EQ(code_of_save(run + "/a", renamed), ErrorCode::unsupported);
  EXPECT_EQ(code_of_save(memory_store(), {}), ErrorCode::unsupported);
  writer.save(tree_of(2), run + "/b").result();
  EXPECT_THAT(floats_at(run + "/b", "w"), Contains(2.0F));
}

TEST(WriterProcess, HooksAndStopWorkThroughIt) {
  const std::string run = temporary_directory();
  CheckpointWriter writer(by_process({.rate = 1'000'000}));
  std::vector<std::string> phases;
  std::uint64_t done = 0;
  SaveOptions options;
  options.events = [&](const Event& event) { phases.emplace_back(event.phase); };
  options.progress = [&](const Progress& progress) { done = progress.done; };
  writer.save(tree_of(1), run + "/heard", options).result();
  EXPECT_THAT(phases, ElementsAre("plan", "write", "commit", "all"));
  EXPECT_GE(done, 4000U);
  std::stop_source source;
  options.stop = source.get_token();
  const auto begin = std::chrono::steady_clock::now();
  const PendingSave pending =
      writer.save(Value::dict({{"w", numbers(3'000'000, 0)}}), run + "/stopped", options);
  std::this_thread::sleep_for(100ms);
  source.request_stop();
  EXPECT_EQ(code_of([&] { pending.result(); }), ErrorCode::cancelled);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 10s) << "the arena is read at 1 MB/s";
  options.stop = {};
  options.progress = [](const Progress&) { throw Error(ErrorCode::limit, "enough"); };
  const Error thrown =
      error_of([&] { writer.save(tree_of(1), run + "/thrown", options).result(); });
  EXPECT_EQ(thrown.code(), ErrorCode::limit);
  // The hook of a small save hears of it when it is committed.
  EXPECT_EQ(fs::exists(run + "/thrown/.metadata"),
            std::string(thrown.what()).find("complete all the same") != std::string::npos);
  writer.save(tree_of(3), run + "/after").result();
}

TEST(WriterProcess, AFailureIsOneErrorAndTheNextSaveWorks) {
  const std::string run = temporary_directory();
  CheckpointWriter writer(by_process());
  writer.save(tree_of(1), run + "/a").result();
  const Error error = error_of([&] { writer.save(tree_of(2), run + "/a").result(); });
  EXPECT_EQ(error.code(), ErrorCode::already_exists);
  EXPECT_THAT(error.what(), HasSubstr(run + "/a"));
  (void)writer.save(tree_of(2), run + "/a");
  EXPECT_EQ(code_of([&] { writer.wait(); }), ErrorCode::already_exists);  // R13
  writer.save(tree_of(3), run + "/b").result();
  EXPECT_THAT(names_in(run), ::testing::UnorderedElementsAre("a", "b"));
}

TEST(WriterProcess, OneThatIsKilledIsNamedByThisSaveAndTheNext) {
  const std::string run = temporary_directory();
  CheckpointWriter writer(by_process({.rate = 1'000'000}));
  const PendingSave pending = writer.save(Value::dict({{"w", numbers(1'000'000, 0)}}), run + "/a");
  ASSERT_EQ(children().size(), 1U);
  EXPECT_NO_THROW(writer.require_alive());
  ::kill(children()[0], SIGKILL);
  const Error error = error_of([&] { pending.result(); });
  EXPECT_EQ(error.code(), ErrorCode::io);
  EXPECT_THAT(error.what(), HasSubstr("was ended by signal 9"));
  EXPECT_THAT(error_of([&] { writer.save(tree_of(1), run + "/b").result(); }).what(),
              HasSubstr("was ended by signal 9"));
  EXPECT_EQ(open_code(run + "/a"), ErrorCode::not_found);
  EXPECT_THAT(error_of([&] { writer.require_alive(); }).what(), HasSubstr("was ended by signal 9"));
  CheckpointWriter(by_process()).save(tree_of(1), run + "/b").result();
}

TEST(WriterProcess, OneThatIsGivenUpIsGone) {
  const std::string run = temporary_directory();
  CheckpointWriter writer(by_process({.silence = 500ms}));
  ASSERT_EQ(children().size(), 1U);
  ::kill(children()[0], SIGSTOP);
  EXPECT_EQ(code_of([&] { writer.save(tree_of(1), run + "/a").result(); }), ErrorCode::timeout);
  EXPECT_EQ(code_of([&] { writer.require_alive(); }), ErrorCode::io);
}

TEST(WriterProcess, NoCommandIsSaidWithThePlacesThatWereTried) {
  const Error error =
      error_of([] { CheckpointWriter writer(by_process({.program = "/nowhere/tessera"})); });
  EXPECT_EQ(error.code(), ErrorCode::not_found);
  EXPECT_THAT(error.what(), HasSubstr("/nowhere/tessera"));
}

// As "never", or far too short for anybody.
TEST(WriterProcess, AnySilenceMayBeGiven) {
  const std::string run = temporary_directory();
  CheckpointWriter patient(by_process({.silence = std::chrono::milliseconds::max()}));
  patient.save(tree_of(1), run + "/a").result();
  EXPECT_EQ(code_of([] { CheckpointWriter none(by_process({.silence = 0ms})); }),
            ErrorCode::invalid_argument);
}

// It would stay, and nobody waits for ever.
TEST(WriterProcess, OneThatWasStoppedEndsWithItsWriter) {
  const auto begin = std::chrono::steady_clock::now();
  {
    CheckpointWriter writer(by_process({.silence = 500ms}));
    ASSERT_EQ(children().size(), 1U);
    ::kill(children()[0], SIGSTOP);
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 30s);
  EXPECT_THAT(children(), IsEmpty());
}

// As an object store has it: what was replaced while it was open cannot be read any more.
class ReplacedSource final : public ByteSource {
 public:
  [[nodiscard]] std::uint64_t size() const override { return 8; }
  void read_at(std::uint64_t /*offset*/, MutableByteView /*out*/) const override {
    throw Error(ErrorCode::conflict, "the object was replaced or removed while it was open");
  }
  [[nodiscard]] const std::string& name() const override { return name_; }

 private:
  const std::string name_ = "an object that was replaced";
};

// Of whose signs of life every other one is replaced while it is read.
class ReplacingStore final : public ForwardingStore {
 public:
  using ForwardingStore::ForwardingStore;
  [[nodiscard]] std::shared_ptr<ByteSource> open(std::string_view name) const override {
    if (name.starts_with("alive-") && ++opened_ % 2 == 1) return std::make_shared<ReplacedSource>();
    return ForwardingStore::open(name);
  }

 private:
  mutable std::atomic<int> opened_ = 0;
};

TEST(WriterProcess, ASignOfLifeThatIsReplacedWhileItIsReadIsOne) {
  const auto meeting = std::make_shared<ReplacingStore>(memory_store());
  const auto meet = [&](int rank) {
    auto group = make_store_group(meeting, rank, 2, 2000ms);
    if (rank == 1) std::this_thread::sleep_for(300ms);
    EXPECT_NO_THROW((void)group->all_gather({}));
    end_meeting(std::move(group));
  };
  std::thread other([&] { meet(1); });
  meet(0);
  other.join();
}

// Somebody else's, of which nobody can tell whether it is at work.
TEST(WriterProcess, AMeetingThatIsClosedToUsKeepsNobodyFromTheLatest) {
  if (::geteuid() != 0) GTEST_SKIP() << "root opens everything";
  const std::string run = temporary_directory();
  save(tree_of(1), run + "/step1");
  const ClosedDirectory closed(run + "/.tessera-writer-0123456789ab-1");
  fs::permissions(run, fs::perms::group_read | fs::perms::group_exec, fs::perm_options::add);
  const Unprivileged unprivileged;
  EXPECT_NO_THROW((void)run_checkpoints(run));
}

TEST(WriterProcess, EndsWithItsWriterAndHasNoFilesOfTheTrainer) {
  const std::string run = temporary_directory();
  const Fd mine(::memfd_create("not for others", 0));  // one that exec() keeps
  {
    CheckpointWriter writer(by_process());
    ASSERT_EQ(children().size(), 1U);
    const fs::path files = "/proc/" + std::to_string(children()[0]) + "/fd";
    writer.save(tree_of(1), run + "/a").result();
    for (const auto& file : fs::directory_iterator(files))
      EXPECT_THAT(fs::read_symlink(file).string(), ::testing::Not(HasSubstr("not for others")));
  }
  EXPECT_THAT(children(), IsEmpty());
}

// A worker that was forked holds the connection open.
TEST(WriterProcess, AChildOfForkLeavesItAlone) {
  const std::string run = temporary_directory();
  CheckpointWriter writer(by_process());
  writer.save(tree_of(1), run + "/a").result();
  const pid_t child = ::fork();
  if (child == 0) {
    const bool is_refused =
        code_of([&] { (void)writer.save(tree_of(2), run + "/b"); }) == ErrorCode::invalid_argument;
    ::_exit(is_refused ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  writer.save(tree_of(3), run + "/c").result();
}

}  // namespace
}  // namespace tessera
