// What a CheckpointWriter of one process promises.
#include <gmock/gmock.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <future>
#include <string>
#include <thread>

#include "base/testing.h"
#include "checkpoint/background/testing.h"
#include "comm/testing.h"

namespace tessera {
namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)
using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Clock = std::chrono::steady_clock;

// A tree that no save takes: its tensor reaches beyond its memory.
Value beyond_its_memory() {
  Tensor tensor = counting({4}, whole({4}), 0);
  tensor.pieces[0].storage->size = 8;
  return Value::dict({{"w", Value(std::move(tensor))}});
}

Value one_number(float first) {
  return Value::dict({{"w", numbers(1, first)}});
}

SaveOptions stopped() {
  std::stop_source source;
  source.request_stop();
  SaveOptions options;
  options.stop = source.get_token();
  return options;
}

// While the tensors change behind each call, the digests on disk are those of the calls.
TEST(CheckpointWriter, SavesWhatTheTensorsWereAtTheCall_R15) {
  constexpr int kSaves = 40;
  constexpr std::int64_t kCount = 200'000;
  const std::string run = temporary_directory();
  Value tree = Value::dict({{"w", numbers(kCount, 0)}, {"step", 0}});
  float* const w = elements_of(tree, "w");
  CheckpointWriter writer(prompt());
  std::vector<PendingSave> saves;
  for (int step = 0; step < kSaves; ++step) {
    std::fill_n(w, kCount, static_cast<float>(step));
    tree.set_item("step", step);
    saves.push_back(writer.save(tree, run + "/step" + std::to_string(step)));
    EXPECT_TRUE(saves.back().staged());
    tree.set_item("step", -1);
    std::thread([&] { std::fill_n(w, kCount, -1.0F); }).join();
  }
  for (int step = 0; step < kSaves; ++step) {
    EXPECT_GT(saves.at(static_cast<std::size_t>(step)).result().total_bytes, 4U * kCount);
    const Value found = Checkpoint::open(run + "/step" + std::to_string(step)).load();
    EXPECT_EQ(found.at("step").as_int(), step);
    EXPECT_EQ(floats(found.at("w").as_tensor()),
              std::vector<float>(kCount, static_cast<float>(step)));
  }
}

// Whatever a tree may be: the files are those that save() makes.
TEST(CheckpointWriter, MakesTheFilesThatASaveMakes) {
  const auto storage = memory(4000);
  for (std::size_t i = 0; i < 1000; ++i)
    reinterpret_cast<float*>(storage->data)[i] = static_cast<float>(i);
  Tensor columns;
  columns.shape = {10, 20};
  columns.pieces.push_back({whole({10, 20}), storage, 3, {1, 10}, -1});
  Tensor part = columns;
  part.pieces[0].storage_offset = 500;
  part.pieces[0].strides = {};
  const Value tree =
      Value::dict({{"columns", Value(columns)}, {"part", Value(part)}, {"n", numbers(7, 1)}});
  const std::string directory = temporary_directory();
  CheckpointWriter writer(prompt());
  for (const char* name : {"/a.pt", "/a.safetensors"}) {
    const std::string behind = directory + "/behind" + name;
    save(tree, directory + name);
    writer.save(tree, behind).result();
    EXPECT_EQ(text_of(behind), text_of(directory + name)) << name;
  }
  SaveOptions olmo;
  olmo.kind = CheckpointKind::olmo_full;
  const Value training = Value::dict(
      {{"model", Value::dict({{"columns", Value(columns)}})}, {"train", Value::dict({{"n", 1}})}});
  writer.save(training, directory + "/olmo", olmo).result();
  const Checkpoint olmo_full = Checkpoint::open(directory + "/olmo");
  EXPECT_EQ(olmo_full.kind, CheckpointKind::olmo_full);
  const SaveResult result = writer.save(tree, directory + "/dcp").result();
  EXPECT_TRUE(committed(directory + "/dcp", result.save_id));
  EXPECT_TRUE(
      diff(Checkpoint::open(directory + "/dcp"), Checkpoint::open(directory + "/a.pt")).empty());
}

TEST(CheckpointWriter, OneSaveAfterTheOtherHasTheArena_R11) {
  const GatedPlace slow;
  CheckpointWriter writer(prompt());
  const PendingSave first = writer.save(one_number(1), slow.where());
  slow.gate().await_somebody();
  EXPECT_TRUE(first.staged());
  EXPECT_FALSE(first.done());
  std::atomic<bool> has_begun = false;
  std::thread trainer([&] {
    const PendingSave second = writer.save(one_number(2), slow.where(), replacing());
    has_begun = true;
    EXPECT_TRUE(first.done());
    second.result();
  });
  std::this_thread::sleep_for(50ms);
  EXPECT_FALSE(has_begun);
  slow.gate().open();
  trainer.join();
  EXPECT_THAT(floats_at(Location(slow.inner()), "w"), ElementsAre(2));
}

TEST(CheckpointWriter, RefusesASecondSaveIfToldSo_R11) {
  const GatedPlace slow;
  CheckpointWriter writer(prompt({.if_busy = IfBusy::refuse}));
  const PendingSave first = writer.save(one_number(1), slow.where());
  const PendingSave second = writer.save(one_number(2), slow.where(), replacing());
  EXPECT_FALSE(second.staged());
  EXPECT_TRUE(second.done()) << "at once";
  bool has_called_back = false;
  (void)writer.save(one_number(2), slow.where(), replacing(),
                    [&](const PendingSave&) { has_called_back = true; });
  slow.gate().open();
  first.result();
  EXPECT_NO_THROW(writer.wait()) << "the handle of the other refusal has said it";
  EXPECT_FALSE(has_called_back);
  const Error error = error_of([&] { second.result(); });
  EXPECT_EQ(error.code(), ErrorCode::limit);
  EXPECT_THAT(error.what(), HasSubstr("IfBusy::refuse"));
  EXPECT_THAT(floats_at(Location(slow.inner()), "w"), ElementsAre(1));
  writer.save(one_number(3), slow.where(), replacing()).result();
  EXPECT_THAT(floats_at(Location(slow.inner()), "w"), ElementsAre(3));
}

// Who has heard how a save ended finds the arena free.
TEST(CheckpointWriter, WhatIsDecidedRefusesNothing) {
  CheckpointWriter writer(prompt({.if_busy = IfBusy::refuse}));
  const auto store = memory_store();
  for (int i = 0; i < 100; ++i)
    writer.save(one_number(static_cast<float>(i)), store, replacing()).result();
}

TEST(CheckpointWriter, AnErrorThatNobodyTookIsThrownByTheNextCall_R13) {
  const std::string directory = temporary_directory();
  CheckpointWriter writer(prompt());
  writer.save(one_number(1), directory).result();
  (void)writer.save(one_number(2), directory);  // already_exists
  bool has_called_back = false;
  const SaveDone hook = [&](const PendingSave&) { has_called_back = true; };
  const Error error =
      error_of([&] { (void)writer.save(one_number(3), directory, replacing(), hook); });
  EXPECT_EQ(error.code(), ErrorCode::already_exists);
  EXPECT_THAT(error.what(), AllOf(HasSubstr("an earlier save"), HasSubstr(directory)));
  writer.wait();
  EXPECT_FALSE(has_called_back) << "of a call that threw";
  EXPECT_THAT(floats_at(directory, "w"), ElementsAre(1)) << "nothing was saved";
  writer.save(one_number(4), directory, replacing()).result();
  EXPECT_THAT(floats_at(directory, "w"), ElementsAre(4));

  (void)writer.save(one_number(5), directory);
  EXPECT_EQ(code_of([&] { writer.wait(); }), ErrorCode::already_exists);
  writer.wait();
}

TEST(CheckpointWriter, AnErrorThatWasTakenIsNotThrownAgain_R13) {
  const std::string directory = temporary_directory();
  CheckpointWriter writer(prompt());
  const PendingSave refused = writer.save(beyond_its_memory(), directory);
  EXPECT_FALSE(refused.staged());
  for (int i = 0; i < 2; ++i) {
    const Error error = error_of([&] { refused.result(); });
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    EXPECT_EQ(error.key(), "w");
  }
  const auto warnings = warnings_of([&] { writer.save(one_number(1), directory).result(); });
  EXPECT_THAT(warnings, ElementsAre());
  EXPECT_THAT(floats_at(directory, "w"), ElementsAre(1));
}

TEST(CheckpointWriter, OfSeveralUntakenErrorsWarningsTellTheRest_R13) {
  const GatedPlace slow;
  CheckpointWriter writer(prompt());
  (void)writer.save(one_number(1), slow.where());
  (void)writer.save(one_number(2), slow.where(), stopped());
  (void)writer.save(one_number(3), slow.where(), stopped());
  slow.gate().open();
  const auto warnings =
      warnings_of([&] { EXPECT_EQ(code_of([&] { writer.wait(); }), ErrorCode::cancelled); });
  ASSERT_EQ(warnings.size(), 1U);
  EXPECT_THAT(warnings[0], HasSubstr("nobody took its error: cancelled"));
}

TEST(CheckpointWriter, ItsEndWaitsForTheSaveUnderWay_R12) {
  const GatedPlace slow;
  std::thread opener;
  {
    CheckpointWriter writer(prompt());
    (void)writer.save(one_number(1), slow.where());
    opener = std::thread([&] {
      slow.gate().await_somebody();
      slow.gate().open();
    });
  }
  opener.join();
  EXPECT_THAT(floats_at(Location(slow.inner()), "w"), ElementsAre(1));
}

TEST(CheckpointWriter, ItsEndSaysWhichErrorsNobodyTook_R12) {
  const std::string directory = temporary_directory();
  save(one_number(1), directory);
  const auto warnings = warnings_of([&] {
    CheckpointWriter writer(prompt());
    (void)writer.save(one_number(2), directory);
  });
  ASSERT_EQ(warnings.size(), 1U);
  EXPECT_THAT(warnings[0], AllOf(HasSubstr(directory), HasSubstr("already_exists")));
}

// What takes too long is asked to end, and what was there stays.
TEST(CheckpointWriter, ItsEndEndsASaveThatTakesTooLong_R12) {
  const std::string directory = temporary_directory();
  save(one_number(1), directory);
  const auto begin = Clock::now();
  const auto warnings = warnings_of([&] {
    CheckpointWriter writer(prompt({.rate = 100'000, .end_within = 4s}));
    (void)writer.save(Value::dict({{"w", numbers(1'000'000, 0)}}), directory, replacing());
  });
  EXPECT_LT(Clock::now() - begin, 4s);
  ASSERT_EQ(warnings.size(), 1U);
  EXPECT_THAT(warnings[0], AllOf(HasSubstr(directory), HasSubstr("cancelled")));
  EXPECT_THAT(floats_at(directory, "w"), ElementsAre(1));
}

TEST(CheckpointWriter, ItsEndLeavesAThreadThatIsStuck_R12) {
  const GatedPlace stuck;
  const auto begin = Clock::now();
  std::optional<PendingSave> pending;
  const auto warnings = warnings_of([&] {
    CheckpointWriter writer(prompt({.end_within = 300ms}));
    pending = writer.save(one_number(1), stuck.where());
    stuck.gate().await_somebody();
  });
  EXPECT_GE(Clock::now() - begin, 300ms);
  ASSERT_EQ(warnings.size(), 1U);
  EXPECT_THAT(warnings[0], HasSubstr("had not ended when its writer did"));
  EXPECT_FALSE(pending->done());
  stuck.gate().open();  // the thread goes on with what it has
  EXPECT_EQ(code_of([&] { pending->result(); }), ErrorCode::cancelled);
}

TEST(CheckpointWriter, CallsBackOnceEachSaveIsDecided) {
  const std::string directory = temporary_directory();
  std::vector<std::string> heard;  // by the writer's thread alone, until it is waited for
  CheckpointWriter writer(prompt());
  const SaveDone hook = [&](const PendingSave& save) {
    EXPECT_TRUE(save.done());
    try {
      heard.push_back(std::to_string(save.result().files));
    } catch (const Error& error) {
      heard.emplace_back(to_string(error.code()));
    }
    EXPECT_EQ(code_of([&] { (void)writer.save(one_number(1), directory); }),
              ErrorCode::invalid_argument);
    EXPECT_EQ(code_of([&] { writer.wait(); }), ErrorCode::invalid_argument);
    EXPECT_THAT(floats_at(directory, "w"), ElementsAre(1));
  };
  (void)writer.save(one_number(1), directory, {}, hook);
  (void)writer.save(one_number(2), directory, {}, hook);
  writer.wait();  // the hook took the error
  EXPECT_THAT(heard, ElementsAre("3", "already_exists"));

  const auto warnings = warnings_of([&] {
    (void)writer.save(one_number(1), directory, replacing(),
                      [](const PendingSave&) { throw std::runtime_error("of the hook"); });
    writer.wait();
  });
  ASSERT_EQ(warnings.size(), 1U);
  EXPECT_THAT(warnings[0], HasSubstr("of the hook"));
}

// What a callback is there to take, no save() takes before it.
TEST(CheckpointWriter, ACallbackTakesTheErrorOfItsSave) {
  const std::string directory = temporary_directory();
  save(one_number(1), directory);
  for (const IfBusy if_busy : {IfBusy::wait, IfBusy::refuse}) {
    CheckpointWriter writer(prompt({.if_busy = if_busy}));
    const SaveDone hook = [](const PendingSave& save) {
      std::this_thread::sleep_for(50ms);
      EXPECT_EQ(code_of([&] { save.result(); }), ErrorCode::already_exists);
    };
    const PendingSave failed = writer.save(one_number(2), directory, {}, hook);
    while (!failed.done()) std::this_thread::sleep_for(1ms);
    EXPECT_NO_THROW(writer.save(one_number(3), memory_store()).result());
  }
}

TEST(CheckpointWriter, APathIsThatOfTheCall) {
  const std::string here = temporary_directory(), elsewhere = temporary_directory();
  const auto before = std::filesystem::current_path();
  Gate gate;
  CheckpointWriter writer(prompt({.if_busy = IfBusy::refuse}));
  (void)writer.save(one_number(1), memory_store(), {}, [&](const PendingSave&) { gate.pass(); });
  gate.await_somebody();  // the next save has not begun
  std::filesystem::current_path(here);
  const PendingSave pending = writer.save(one_number(2), "c");
  std::filesystem::current_path(elsewhere);
  gate.open();
  EXPECT_EQ(pending.result().files, 3U);
  std::filesystem::current_path(before);
  EXPECT_THAT(floats_at(here + "/c", "w"), ElementsAre(2));
}

TEST(CheckpointWriter, AHookEndsAnotherWriterWhichWaits_R12) {
  const auto store = memory_store();
  auto other = std::make_unique<CheckpointWriter>(prompt({.rate = 2'000'000}));
  const PendingSave pending = other->save(Value::dict({{"w", numbers(250'000, 0)}}), store);
  const auto warnings = warnings_of([&] {
    CheckpointWriter writer(prompt());
    (void)writer.save(one_number(1), memory_store(), {}, [&](const PendingSave&) {
      other.reset();
      EXPECT_TRUE(pending.done());
    });
    writer.wait();
  });
  EXPECT_THAT(warnings, ElementsAre());
  EXPECT_EQ(pending.result().files, 3U);
}

// It cannot wait for the save that it is a hook of, which goes on.
TEST(CheckpointWriter, AHookEndsItsOwnWriterWhoseSaveGoesOn_R12) {
  const auto store = memory_store();
  auto writer = std::make_unique<CheckpointWriter>(prompt());
  Gate gate;
  SaveOptions options;
  options.events = [&](const Event&) {
    gate.pass();
    writer.reset();
  };
  std::optional<PendingSave> pending;
  const auto warnings = warnings_of([&] {
    pending = writer->save(one_number(1), store, options);
    gate.open();
    EXPECT_EQ(pending->result().files, 3U);
  });
  ASSERT_EQ(warnings.size(), 1U);
  EXPECT_THAT(warnings[0], HasSubstr("had not ended when its writer did"));
  EXPECT_THAT(floats_at(Location(store), "w"), ElementsAre(1));
}

// A hook of the save itself looks at the place, and asks for the outcome.
TEST(CheckpointWriter, AHookOfASaveDoesNotWaitForIt) {
  const std::string directory = temporary_directory();
  save(one_number(1), directory);
  CheckpointWriter writer(prompt());
  SaveOptions options = replacing();
  std::atomic<int> told = 0;
  options.events = [&](const Event&) {
    ++told;
    EXPECT_EQ(Checkpoint::open(directory).names().size(), 1U);
  };
  writer.save(one_number(2), directory, options).result();
  EXPECT_EQ(told, 4);
}

TEST(CheckpointWriter, HeedsTheStopOfASave) {
  const std::string directory = temporary_directory() + "/c";
  CheckpointWriter writer(prompt({.rate = 100'000}));
  std::stop_source source;
  SaveOptions options;
  options.stop = source.get_token();
  const Value tree = Value::dict({{"w", numbers(1'000'000, 0)}});
  const PendingSave first = writer.save(tree, directory, options);
  std::thread stopper([&] {
    std::this_thread::sleep_for(100ms);
    source.request_stop();
  });
  const PendingSave second = writer.save(tree, directory, options);  // waits for the arena
  stopper.join();
  EXPECT_EQ(code_of([&] { first.result(); }), ErrorCode::cancelled);
  EXPECT_EQ(code_of([&] { second.result(); }), ErrorCode::cancelled);
  EXPECT_EQ(open_code(directory), ErrorCode::not_found);
  const auto begin = Clock::now();
  writer.save(one_number(1), directory).result();
  EXPECT_LT(Clock::now() - begin, 5s) << "the rate of the first save ended with it";
}

// Neither the arena nor another thread's save() that waits for it keeps a call that is to end.
TEST(CheckpointWriter, HeedsAStopBehindAnotherThreadsCall) {
  const GatedPlace slow;
  CheckpointWriter writer(prompt());
  (void)writer.save(one_number(1), slow.where());
  const auto waiting = std::async(
      std::launch::async, [&] { return writer.save(one_number(2), slow.where(), replacing()); });
  std::this_thread::sleep_for(50ms);
  // Nobody but the callback may take its error: save() of the other thread would throw it.
  const auto take = [](const PendingSave& save) { (void)code_of([&] { save.result(); }); };
  auto ended = std::async(std::launch::async, [&] {
    return writer.save(one_number(3), slow.where(), stopped(), take);
  });
  EXPECT_EQ(ended.wait_for(10s), std::future_status::ready);
  slow.gate().open();
  EXPECT_EQ(code_of([&] { ended.get().result(); }), ErrorCode::cancelled);
  waiting.wait();
  writer.wait();
  EXPECT_THAT(floats_at(Location(slow.inner()), "w"), ElementsAre(2));
}

TEST(CheckpointWriter, TakesBytesFromTheArenaAtItsRate) {
  CheckpointWriter writer(prompt({.rate = 20'000'000}));
  const auto store = memory_store();
  const Value tree = Value::dict({{"w", numbers(1'000'000, 5)}});
  const auto begin = Clock::now();
  const PendingSave pending = writer.save(tree, store);
  EXPECT_FALSE(pending.done());
  pending.result();
  EXPECT_GE(Clock::now() - begin, 199ms);
  EXPECT_EQ(floats_at(Location(store), "w"), floats(tree.at("w").as_tensor()));
}

TEST(CheckpointWriter, WorksAtIdlePriorityAndTheCallerDoesNot) {
  const auto policy_of_save = [](const WriterOptions& how) {
    std::atomic<int> policy = -1;
    SaveOptions options;
    options.events = [&](const Event&) { policy = ::sched_getscheduler(0); };
    CheckpointWriter(how).save(one_number(1), memory_store(), options).result();
    return policy.load();
  };
  const int own = ::sched_getscheduler(0);
  EXPECT_EQ(policy_of_save({}), SCHED_IDLE);
  EXPECT_EQ(policy_of_save(prompt()), own);
  EXPECT_EQ(::sched_getscheduler(0), own);
}

TEST(CheckpointWriter, RefusesASaveThatItsArenaCannotHold) {
  const Value small = Value::dict({{"w", numbers(1000, 0)}});
  const Value large = Value::dict({{"w", numbers(2000, 0)}});
  const auto store = memory_store();
  CheckpointWriter fixed(prompt({.bytes = CheckpointWriter::bytes_of(small)}));
  fixed.save(small, store).result();
  const Error error = error_of([&] { fixed.save(large, store, replacing()).result(); });
  EXPECT_EQ(error.code(), ErrorCode::limit);
  EXPECT_THAT(error.what(), HasSubstr("WriterOptions::bytes"));
  fixed.save(small, store, replacing()).result();
  CheckpointWriter grows(prompt());
  grows.save(small, store, replacing()).result();
  grows.save(large, store, replacing()).result();
  EXPECT_EQ(floats_at(Location(store), "w").size(), 2000U);
}

TEST(CheckpointWriter, RefusesOptionsThatNobodyCanMean) {
  const auto code = [](const WriterOptions& options) {
    return code_of([&] { CheckpointWriter writer(options); });
  };
  EXPECT_EQ(code({.threads = 0}), ErrorCode::invalid_argument);
  EXPECT_EQ(code({.threads = 5000}), ErrorCode::invalid_argument);
  EXPECT_EQ(code({.end_within = -1ms}), ErrorCode::invalid_argument);
  EXPECT_EQ(code({.bytes = 1ULL << 60U}), ErrorCode::io);
  EXPECT_EQ(code_of([] { CheckpointWriter writer(std::shared_ptr<Group>{}); }),
            ErrorCode::invalid_argument);
  CheckpointWriter writer(prompt({.end_within = std::chrono::milliseconds::max()}));
  EXPECT_EQ(code_of([&] { writer.save(one_number(1), memory_store(), {.threads = 0}).result(); }),
            ErrorCode::invalid_argument);
}

TEST(CheckpointWriter, SavesTreesWithoutTensorsAndWithManyValues) {
  CheckpointWriter writer(prompt());
  const auto store = memory_store();
  writer.save(Value::dict(), store).result();
  EXPECT_TRUE(Checkpoint::open(store).leaves.empty());
  std::vector<Value::Pair> pairs;
  constexpr int kMany = 100'000;
  pairs.reserve(kMany);
  for (int i = 0; i < kMany; ++i) pairs.emplace_back("v" + std::to_string(i), i);
  Value many = Value::dict(std::move(pairs));
  const PendingSave pending = writer.save(many, store, replacing());
  many = Value();
  pending.result();
  const Checkpoint found = Checkpoint::open(store);
  ASSERT_EQ(found.leaves.size(), static_cast<std::size_t>(kMany));
  EXPECT_EQ(found.find("v99999")->value.as_int(), 99'999);
}

TEST(CheckpointWriter, AHandleOutlivesItsWriterAndItsTree) {
  const std::string directory = temporary_directory();
  std::optional<PendingSave> pending;
  {
    CheckpointWriter writer(prompt());
    pending = writer.save(one_number(3), directory);
  }
  EXPECT_TRUE(pending->done());
  EXPECT_EQ(pending->result().files, 3U);
  EXPECT_THAT(floats_at(directory, "w"), ElementsAre(3));
}

// Kilobytes that this process has in memory.
long resident_now() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("VmRSS:")) return std::atol(line.c_str() + 6);
  return 0;
}

// One snapshot and 64 MiB at the most, whichever save it is.
TEST(CheckpointWriter, MemoryStaysAsItIsOver200Saves) {
  constexpr std::int64_t kCount = 1 << 20;  // 4 MiB
  const std::string directory = temporary_directory();
  const Value tree = Value::dict({{"w", numbers(kCount, 0)}, {"text", std::string(1000, 'x')}});
  const long before = resident_now();
  CheckpointWriter writer(prompt());
  long after_20 = 0, most = 0;
  for (int i = 0; i < 200; ++i) {
    writer.save(tree, directory, replacing()).result();
    most = std::max(most, resident_now());
    if (i == 20) after_20 = resident_now();
  }
  EXPECT_LE(most - before, (4 * kCount + (64 << 20)) / 1024);
  EXPECT_LE(resident_now() - after_20, 8 << 10);
}

TEST(CheckpointWriter, AChildOfForkDoesNotTouchIt_R18) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "ThreadSanitizer has no threads behind a fork";
#endif
  const GatedPlace slow;
  auto writer = std::make_unique<CheckpointWriter>(prompt());
  const PendingSave pending = writer->save(one_number(1), slow.where());
  slow.gate().await_somebody();
  const pid_t child = run_process([&] {
    const auto is_refused = [](const auto& call) {
      return code_of(call) == ErrorCode::invalid_argument;
    };
    const bool all_refused =
        is_refused([&] { (void)writer->save(one_number(2), "/nowhere"); }) &&
        is_refused([&] { writer->wait(); }) && is_refused([&] { pending.result(); }) &&
        is_refused([&] { (void)pending.done(); }) && is_refused([&] { (void)pending.staged(); });
    writer.reset();
    // It has no part in the save under way, and saves for itself.
    const bool is_empty =
        code_of([&] { (void)Checkpoint::open(slow.where()); }) == ErrorCode::not_found;
    const auto store = memory_store();
    CheckpointWriter(prompt()).save(one_number(5), store).result();
    return all_refused && is_empty && floats_at(Location(store), "w").at(0) == 5 ? 0 : 1;
  });
  EXPECT_EQ(end_of(child), 0);
  slow.gate().open();
  pending.result();
  EXPECT_THAT(floats_at(Location(slow.inner()), "w"), ElementsAre(1));
}

}  // namespace
}  // namespace tessera
