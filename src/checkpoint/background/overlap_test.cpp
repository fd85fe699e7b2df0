// Saves whose tensors are copied when save() has returned.
#include <gmock/gmock.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/copies.h"
#include "base/log.h"
#include "base/testing.h"
#include "checkpoint/background/overlap.h"
#include "checkpoint/background/testing.h"
#include "comm/confer.h"
#include "comm/testing.h"
#include "conformance/temporary_directory.h"
#include "tessera/restore.h"
#include "tessera/run_directory.h"
#include "tessera/tensor_view.h"

namespace tessera {
namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)
using namespace std::chrono_literals;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Memory that nobody reads before the gate is open.
class GatedSource final : public ByteSource {
 public:
  GatedSource(std::shared_ptr<Storage> bytes, std::shared_ptr<Gate> gate)
      : bytes_(std::move(bytes)), gate_(std::move(gate)) {}
  [[nodiscard]] std::uint64_t size() const override { return bytes_->size; }
  void read_at(std::uint64_t offset, MutableByteView out) const override {
    gate_->pass();
    std::memcpy(out.data(), bytes_->data + offset, out.size());
  }
  [[nodiscard]] const std::string& name() const override { return name_; }

 private:
  const std::string name_ = "a tensor behind a gate";
  const std::shared_ptr<Storage> bytes_;
  const std::shared_ptr<Gate> gate_;
};

// A tree with the tensors "slow", whose copy waits at the gate, and "w".
struct SlowTree {
  explicit SlowTree(float first)
      : tree(Value::dict({{"slow", numbers(4, first)}, {"w", numbers(4, first)}})) {
    auto& storage = tree.at("slow").as_tensor().pieces.at(0).storage;
    bytes = std::exchange(storage, std::make_shared<Storage>());
    storage->source = std::make_shared<GatedSource>(bytes, gate);
    storage->size = bytes->size;
  }
  ~SlowTree() { gate->open(); }
  SlowTree(const SlowTree&) = delete;
  SlowTree& operator=(const SlowTree&) = delete;

  [[nodiscard]] float* slow() const { return reinterpret_cast<float*>(bytes->data); }
  [[nodiscard]] static SteadyMemory steady() {
    return {.has = [](const Storage& storage) { return storage.source != nullptr; }};
  }

  std::shared_ptr<Gate> gate = std::make_shared<Gate>();
  Value tree;
  std::shared_ptr<Storage> bytes;
};

WriterOptions always() {
  return prompt({.overlap = Overlap::always});
}

TEST(Overlap, CopiesWhatIsSteadyBehindTheCall) {
  SlowTree slow(1);
  const auto store = memory_store();
  CheckpointWriter writer(always());
  const PendingSave pending = writer.save(slow.tree, store, {}, {}, SlowTree::steady());
  EXPECT_FALSE(pending.staged());
  EXPECT_FALSE(pending.done());
  // All else is copied.
  std::fill_n(elements_of(slow.tree, "w"), 4, -1.0F);
  std::atomic<bool> has_stepped = false;
  std::thread optimizer([&] {
    begin_step();
    has_stepped = true;
    std::fill_n(slow.slow(), 4, -1.0F);
  });
  slow.gate->await_somebody();
  EXPECT_FALSE(has_stepped);
  slow.gate->open();
  pending.await_staged();
  EXPECT_TRUE(pending.staged());
  optimizer.join();
  pending.result();
  EXPECT_THAT(floats_at(store, "slow"), ElementsAre(1, 2, 3, 4));
  EXPECT_THAT(floats_at(store, "w"), ElementsAre(1, 2, 3, 4));
}

TEST(Overlap, CopiesAtOnceWithoutIt) {
  for (const Overlap how : {Overlap::never, Overlap::measured}) {
    SlowTree slow(1);
    slow.gate->open();
    CheckpointWriter writer(prompt({.overlap = how}));
    const auto store = memory_store();
    // Nobody says that what changes it waits.
    const PendingSave pending = writer.save(slow.tree, store, {}, {}, SlowTree::steady());
    EXPECT_TRUE(pending.staged());
    std::fill_n(slow.slow(), 4, -1.0F);
    EXPECT_THAT((pending.result(), floats_at(store, "slow")), ElementsAre(1, 2, 3, 4));
  }
}

// Of storages that overlap one is not steady.
TEST(Overlap, CopiesAtOnceWhatSharesMemoryWithOther) {
  const auto bytes = memory(16);
  const auto half = std::make_shared<Storage>(*bytes);
  half->size = 8;
  Value tree = Value::dict({{"all", numbers(4, 1)}, {"half", numbers(2, 1)}});
  tree.at("all").as_tensor().pieces[0].storage = bytes;
  tree.at("half").as_tensor().pieces[0].storage = half;
  CheckpointWriter writer(always());
  const auto is_half = [&](const Storage& storage) { return storage.size == half->size; };
  EXPECT_TRUE(writer.save(tree, memory_store(), {}, {}, {.has = is_half}).staged());
  const auto is_any = [](const Storage& /*storage*/) { return true; };
  const auto store = memory_store();
  writer.save(tree, store, {}, {}, {.has = is_any}).result();
  EXPECT_THAT(floats_at(store, "half"), ElementsAre(0, 0));
}

TEST(Overlap, WhatWasChangedIsConflictOnAllRanks) {
  const auto store = memory_store();
  run_ranks(2, [&](Group& group) {
    SlowTree slow(1);
    slow.gate->open();
    CheckpointWriter writer(owned(group), always());
    SteadyMemory steady = SlowTree::steady();
    if (group.rank() == 1) {
      steady.require_unchanged = [] {
        throw Error(ErrorCode::conflict, "was changed").at_key("slow");
      };
    }
    const PendingSave pending = writer.save(slow.tree, Location(store), {}, {}, std::move(steady));
    pending.await_staged();
    EXPECT_EQ(pending.staged(), group.rank() == 0);
    const Error error = *failure_of([&] { pending.result(); });
    EXPECT_EQ(error.code(), ErrorCode::conflict);
    EXPECT_THAT(error.what(), HasSubstr("rank 1"));
    EXPECT_THAT(error.what(), HasSubstr("slow"));
    // The next one works.
    writer.save(slow.tree, Location(store), {}, {}, SlowTree::steady()).result();
    writer.wait();
  });
}

// Memory of which the caller says that it is steady, and whether it was.
SteadyMemory asked(std::function<void()> require_unchanged) {
  return {.has = [](const Storage& /*storage*/) { return true; },
          .require_unchanged = std::move(require_unchanged)};
}

// Who changes memory is asked when it comes by, on its own thread.
TEST(Overlap, TheCallerIsAskedWhenItComesBy) {
  Value tree = Value::dict({{"w", numbers(4, 1)}});
  bool has_changed = false;  // what counts changes: to write while the thread copies is a race
  const auto caller = std::this_thread::get_id();
  SteadyMemory steady = asked([&has_changed, caller] {
    EXPECT_EQ(std::this_thread::get_id(), caller);
    if (has_changed) throw Error(ErrorCode::conflict, "was changed");
  });
  const auto come_by = std::vector<std::function<void(CheckpointWriter&, const PendingSave&)>>{
      [](auto&, const PendingSave& pending) { pending.await_staged(); },
      [](auto&, const PendingSave& pending) {
        while (!pending.staged() && !pending.done()) continue;
      },
      [](auto&, const PendingSave& pending) {
        while (!pending.done()) continue;
      },
      [](auto&, const PendingSave& pending) { (void)failure_of([&] { pending.result(); }); },
      [](CheckpointWriter& writer, auto&) { (void)failure_of([&] { writer.wait(); }); },
      [](auto&, auto&) { begin_step(); }};
  for (const bool is_changed : {false, true}) {
    for (const auto& by : come_by) {
      const auto store = memory_store();
      CheckpointWriter writer(always());
      const PendingSave pending = writer.save(tree, store, {}, {}, steady);
      std::this_thread::sleep_for(2ms);
      EXPECT_TRUE(store->list("").empty());
      has_changed = is_changed;
      by(writer, pending);
      has_changed = !is_changed;  // what is changed behind that is not saved
      pending.await_staged();
      EXPECT_EQ(pending.staged(), !is_changed);
      if (is_changed) EXPECT_EQ(code_of([&] { pending.result(); }), ErrorCode::conflict);
      if (!is_changed)
        EXPECT_THAT((pending.result(), floats_at(store, "w")), ElementsAre(1, 2, 3, 4));
    }
  }
}

// Whatever another thread asks meanwhile, the caller may be in the middle of a change. Nothing is
// written before it comes by, and nobody waits for ever.
TEST(Overlap, AnotherThreadAsksNobody) {
  Value tree = Value::dict({{"w", numbers(4, 1)}});
  const auto by_another = std::vector<std::function<void(CheckpointWriter&, const PendingSave&)>>{
      [](auto&, const PendingSave& pending) { EXPECT_FALSE(pending.staged() || pending.done()); },
      [](auto&, auto&) { begin_step(); },
      [](auto&, const PendingSave& pending) { (void)failure_of([&] { pending.result(); }); },
      [](auto&, const PendingSave& pending) { pending.await_staged(); },
      [](CheckpointWriter& writer, auto&) { (void)failure_of([&] { writer.wait(); }); }};
  for (const auto& by : by_another) {
    const auto store = memory_store();
    CheckpointWriter writer(always());
    bool has_changed = false;
    const PendingSave pending = writer.save(tree, store, {}, {}, asked([&has_changed] {
                                              if (has_changed)
                                                throw Error(ErrorCode::conflict, "was changed");
                                            }));
    std::thread other([&] { by(writer, pending); });
    std::this_thread::sleep_for(20ms);
    EXPECT_TRUE(store->list("").empty());
    has_changed = true;  // the operation has ended now
    EXPECT_EQ(code_of([&] { pending.result(); }), ErrorCode::conflict);
    other.join();
  }
}

// One that waits for the thread that waits for the save, or has ended.
TEST(Overlap, ACallerThatStaysAwayKeepsNobody) {
  Value tree = Value::dict({{"w", numbers(2, 1)}});
  WriterOptions options = always();
  options.ask_within = 200ms;
  CheckpointWriter writer(options);
  const auto store = memory_store();
  const PendingSave pending = writer.save(tree, store, {}, {}, asked([] {}));
  std::thread([&] { pending.result(); }).join();
  EXPECT_THAT(floats_at(store, "w"), ElementsAre(1, 2));
  std::optional<PendingSave> left;
  std::thread([&] { left = writer.save(tree, store, replacing(), {}, asked([] {})); }).join();
  left->result();
}

// However long it may stay away.
TEST(Overlap, TimesAreAsTheyAreSaid) {
  Value tree = Value::dict({{"w", numbers(2, 1)}});
  for (const auto within : {0ms, 70ms, std::chrono::milliseconds::max()}) {
    WriterOptions options = always();
    options.ask_within = within;
    CheckpointWriter writer(options);
    std::atomic<bool> is_asked = false;
    const PendingSave pending =
        writer.save(tree, memory_store(), {}, {}, asked([&] { is_asked = true; }));
    std::this_thread::sleep_for(30ms);
    if (within > 0ms) {
      EXPECT_FALSE(is_asked);
    }
    pending.await_staged();
    EXPECT_TRUE(is_asked);
  }
}

// What is asked may come by itself.
TEST(Overlap, AQuestionMayLoad) {
  const auto other = memory_store();
  save(Value::dict({{"x", numbers(2, 5)}}), other);
  Value tree = Value::dict({{"w", numbers(2, 1)}});
  CheckpointWriter writer(always());
  std::optional<PendingSave> pending;
  Value target = Value::dict({{"x", numbers(2, 0)}});
  pending = writer.save(tree, memory_store(), {}, {}, asked([&] {
                          load(target, other);
                          EXPECT_FALSE(pending->done());
                        }));
  pending->result();
  EXPECT_THAT(floats(target.at("x").as_tensor()), ElementsAre(5, 6));
}

// A source of the tree that reads another checkpoint waits for no copy: it is part of one.
TEST(Overlap, ASourceMayRead) {
  class ReadingSource final : public ByteSource {
   public:
    explicit ReadingSource(std::shared_ptr<Store> from) : from_(std::move(from)) {}
    [[nodiscard]] std::uint64_t size() const override { return 8; }
    void read_at(std::uint64_t offset, MutableByteView out) const override {
      Value target = Value::dict({{"x", numbers(2, 0)}});
      load(target, from_);
      std::memcpy(out.data(), reinterpret_cast<std::byte*>(elements_of(target, "x")) + offset,
                  out.size());
    }
    [[nodiscard]] const std::string& name() const override { return name_; }

   private:
    const std::string name_ = "another checkpoint";
    const std::shared_ptr<Store> from_;
  };
  const auto other = memory_store();
  save(Value::dict({{"x", numbers(2, 5)}}), other);
  Value tree = Value::dict({{"w", numbers(2, 1)}});
  auto& storage = tree.at("w").as_tensor().pieces.at(0).storage;
  storage = std::make_shared<Storage>();
  storage->source = std::make_shared<ReadingSource>(other);
  storage->size = 8;
  CheckpointWriter writer(always());
  const auto store = memory_store();
  writer.save(tree, store, {}, {}, asked([] {})).result();
  EXPECT_THAT(floats_at(store, "w"), ElementsAre(5, 6));
}

// Who opens the place comes by before it waits for the save.
TEST(Overlap, WhoOpensThePlaceComesBy) {
  const TemporaryDirectory run;
  Value tree = Value::dict({{"w", numbers(2, 1)}});
  WriterOptions options = always();
  options.ask_within = 1h;
  CheckpointWriter writer(options);
  const auto save_step = [&](int step) {
    return writer.save(tree, run.path() + "/step" + std::to_string(step), {}, {}, asked([] {}));
  };
  (void)save_step(1);
  EXPECT_EQ(latest_checkpoint(run.path()).found->step, 1);
  (void)save_step(2);
  EXPECT_EQ(floats_at(run.path() + "/step2", "w").size(), 2U);
  (void)save_step(3);
  (void)retain(run.path(), run_checkpoint(run.path(), 3));
  (void)save_step(4);
  EXPECT_EQ(run_checkpoints(run.path()).size(), 4U);
}

// A stop ends the wait for a copy of another save, and for the caller.
TEST(Overlap, AStopEndsEachWait) {
  SlowTree slow(1);
  WriterOptions options = always();
  options.ask_within = 1h;
  CheckpointWriter writer(options);
  const PendingSave first = writer.save(slow.tree, memory_store(), {}, {}, SlowTree::steady());
  std::stop_source stop;
  SaveOptions stopped;
  stopped.stop = stop.get_token();
  std::thread stopper([&] {
    std::this_thread::sleep_for(50ms);
    stop.request_stop();
  });
  const PendingSave second = writer.save(slow.tree, memory_store(), stopped, {});
  EXPECT_FALSE(second.staged());
  stopper.join();
  slow.gate->open();
  EXPECT_EQ(code_of([&] { second.result(); }), ErrorCode::cancelled);
  std::stop_source away;
  stopped.stop = away.get_token();
  Value tree = Value::dict({{"w", numbers(2, 1)}});
  const PendingSave third = writer.save(tree, memory_store(), stopped, {}, asked([] {}));
  away.request_stop();
  std::thread([&] { EXPECT_EQ(code_of([&] { third.result(); }), ErrorCode::cancelled); }).join();
}

// On another thread, before its time is over.
TEST(Overlap, TheEndOfTheWriterWaitsForNoCaller) {
  Value tree = Value::dict({{"w", numbers(2, 1)}});
  const auto store = memory_store();
  WriterOptions options = always();
  options.ask_within = 1h;
  options.end_within = 2s;
  auto writer = std::make_unique<CheckpointWriter>(options);
  (void)writer->save(tree, store, {}, {}, asked([] {}));
  std::thread([&] { writer.reset(); }).join();
  EXPECT_THAT(floats_at(store, "w"), ElementsAre(1, 2));
}

TEST(Overlap, TheEndOfTheWriterTakesNoLongerThanItSays) {
  SlowTree slow(1);
  WriterOptions options = always();
  options.end_within = 400ms;
  auto writer = std::make_unique<CheckpointWriter>(options);
  (void)writer->save(slow.tree, memory_store(), {}, {}, SlowTree::steady());
  slow.gate->await_somebody();
  const Warnings warnings;
  const auto begin = std::chrono::steady_clock::now();
  writer.reset();
  const auto took = std::chrono::steady_clock::now() - begin;
  EXPECT_GE(took, 400ms);
  EXPECT_LT(took, 700ms);
}

// A caller that never comes by has a writer that ends.
TEST(Overlap, TheEndOfTheWriterComesBy) {
  Value tree = Value::dict({{"w", numbers(2, 1)}});
  const auto store = memory_store();
  {
    CheckpointWriter writer(always());
    (void)writer.save(tree, store, {}, {}, asked([] {}));
  }
  EXPECT_THAT(floats_at(store, "w"), ElementsAre(1, 2));
}

// One that fails before it has ended keeps nobody.
TEST(Overlap, ACopyThatGoesLetsGoWhoWaits) {
  auto copy = std::make_unique<CopyUnderWay>();
  std::atomic<bool> waits = false;
  std::thread optimizer([&] {
    waits = true;
    begin_step();
  });
  while (!waits) std::this_thread::yield();
  std::this_thread::sleep_for(20ms);
  copy.reset();
  optimizer.join();
}

TEST(Overlap, WhoRefusesDoesNotWaitForACopy) {
  SlowTree slow(1);
  WriterOptions options = always();
  options.if_busy = IfBusy::refuse;
  CheckpointWriter writer(options);
  const PendingSave pending = writer.save(slow.tree, memory_store(), {}, {}, SlowTree::steady());
  slow.gate->await_somebody();
  const PendingSave refused = writer.save(slow.tree, memory_store(), {}, {}, SlowTree::steady());
  EXPECT_FALSE(pending.staged());
  EXPECT_EQ(code_of([&] { refused.result(); }), ErrorCode::limit);
  slow.gate->open();
  pending.result();
}

// Whatever of the library writes to tensors, here to "x".
void expect_waiting(const std::function<void(Value& target, const Location& other)>& write) {
  const auto other = memory_store();
  save(Value::dict({{"x", numbers(2, 5)}}), other);
  SlowTree slow(1);
  CheckpointWriter writer(always());
  const PendingSave pending = writer.save(slow.tree, memory_store(), {}, {}, SlowTree::steady());
  Value target = Value::dict({{"x", numbers(2, 0)}});
  std::thread thread([&] { write(target, other); });
  slow.gate->await_somebody();
  std::this_thread::sleep_for(20ms);
  EXPECT_THAT(floats(target.at("x").as_tensor()), ElementsAre(0, 1));
  slow.gate->open();
  thread.join();
  EXPECT_NE(floats(target.at("x").as_tensor()).at(0), 0);
  pending.result();
}

TEST(Overlap, LoadsWaitForIt) {
  expect_waiting([](Value& target, const Location& other) { load(target, other); });
}

TEST(Overlap, ReadsWaitForIt) {
  expect_waiting([](Value& target, const Location& other) {
    const auto x = TensorView::of(elements_of(target, "x"), DType::float32, {2});
    (void)Checkpoint::open(other).read("x", x);
  });
}

TEST(Overlap, SpoilingWaitsForIt) {
  expect_waiting([](Value& target, const Location& /*other*/) {
    (void)spoiled(target, Error(ErrorCode::corrupt, "a test"));
  });
}

// What hears that all is copied may end the writer and what it wrote over.
TEST(Overlap, ItsThreadHasNothingOfTheWriterBehindIt) {
  for (int i = 0; i < 300; ++i) {
    SlowTree slow(1);
    slow.gate->open();
    std::weak_ptr<Group> left;
    {
      std::shared_ptr<Group> group = solo_group();
      left = group;
      CheckpointWriter writer(std::move(group), always());
      (void)writer.save(slow.tree, memory_store(), {}, {}, SlowTree::steady());
    }
    ASSERT_TRUE(left.expired());
  }
}

// A child has no thread that copies.
TEST(Overlap, AChildOfForkDoesNotWait_R18) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "ThreadSanitizer has no threads behind a fork";
#endif
  SlowTree slow(1);
  const auto store = memory_store();
  auto writer = std::make_unique<CheckpointWriter>(always());
  const PendingSave pending = writer->save(slow.tree, store, {}, {}, SlowTree::steady());
  slow.gate->await_somebody();
  const pid_t child = run_process([&] {
    begin_step();
    const bool is_refused = code_of([&] { pending.await_staged(); }) == ErrorCode::invalid_argument;
    writer.reset();
    return is_refused ? 0 : 1;
  });
  EXPECT_EQ(end_of(child), 0);
  slow.gate->open();
  pending.result();
}

// Saves as a training has them, each before a step that takes so long.
std::vector<bool> ways_of(OverlapChoice& choice, int saves, std::chrono::milliseconds waiting,
                          std::chrono::milliseconds beside) {
  std::vector<bool> ways;
  begin_step();
  for (int i = 0; i < saves; ++i) {
    ways.push_back(choice.is_beside_step());
    std::this_thread::sleep_for(ways.back() ? beside : waiting);
    begin_step();
  }
  return ways;
}

TEST(Overlap, MeasuresBothWaysAndTakesTheCheaper) {
  for (const bool is_beside_cheaper : {false, true}) {
    OverlapChoice choice(Overlap::measured);
    const auto ways =
        ways_of(choice, 10, is_beside_cheaper ? 30ms : 0ms, is_beside_cheaper ? 0ms : 30ms);
    EXPECT_THAT(std::vector<bool>(ways.begin(), ways.begin() + 7),
                ElementsAre(false, false, true, false, true, false, true));
    EXPECT_THAT(std::vector<bool>(ways.begin() + 7, ways.end()), Each(is_beside_cheaper));
  }
}

// As an embedding with max_norm does in its forward, or an evaluation with averaged weights.
TEST(Overlap, WhatChangesBeforeTheNextStepIsNotCopiedBesideIt) {
  OverlapChoice choice(Overlap::measured);
  for (int i = 0; i < 10; ++i) {
    begin_step();
    EXPECT_FALSE(choice.is_beside_step([] { throw Error(ErrorCode::conflict, "was changed"); }));
  }
  OverlapChoice always(Overlap::always);
  always.note_change();
  EXPECT_TRUE(always.is_beside_step());
}

// It may begin to change when all was steady at first. One save is lost then, not every other one.
TEST(Overlap, BehindAConflictSavesWait) {
  Value tree = Value::dict({{"w", numbers(4, 1)}});
  CheckpointWriter writer(prompt());
  bool is_in_step = false;  // of a save that has waited
  int conflicts = 0;
  for (int i = 0; i < 12; ++i) {
    is_in_step = true;
    begin_step();
    is_in_step = false;
    auto steady = asked([&is_in_step] {
      if (!is_in_step) throw Error(ErrorCode::mismatch, "changed");
    });
    steady.is_awaited = true;
    const auto pending = writer.save(tree, memory_store(), {}, {}, std::move(steady));
    if (failure_of([&] { pending.result(); })) ++conflicts;
  }
  EXPECT_EQ(conflicts, 1);
}

TEST(Overlap, WithoutStepsItWaits) {
  OverlapChoice choice(Overlap::measured);
  for (int i = 0; i < 20; ++i) EXPECT_FALSE(choice.is_beside_step());
}

// Steps of another thread say nothing of what this one changes.
TEST(Overlap, BesideStepsOfAnotherThreadItWaits) {
  OverlapChoice choice(Overlap::measured);
  for (int i = 0; i < 10; ++i) {
    std::thread([] { begin_step(); }).join();
    EXPECT_FALSE(choice.is_beside_step());
  }
}

// Of two saves before one step neither is measured, and neither is one that copies nothing.
TEST(Overlap, SavesThatAreNotAloneOrFailCountForNothing) {
  OverlapChoice twice(Overlap::measured);
  OverlapChoice failing(Overlap::measured);
  for (int i = 0; i < 10; ++i) {
    begin_step();
    (void)twice.is_beside_step();
    (void)twice.is_beside_step();
    (void)failing.is_beside_step();
    failing.note_failure();
  }
  // The next one that counts is the first of its kind.
  begin_step();
  EXPECT_FALSE(failing.is_beside_step());
  begin_step();
  EXPECT_TRUE(failing.is_beside_step());
  EXPECT_FALSE(twice.is_beside_step());
}

}  // namespace
}  // namespace tessera
