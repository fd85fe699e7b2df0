// One job at a time goes on with a run (fault-rows C10).
#include <gmock/gmock.h>
#include <unistd.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/testing.h"
#include "checkpoint/background/testing.h"
#include "checkpoint/run/testing.h"
#include "comm/confer.h"
#include "comm/testing.h"
#include "conformance/temporary_directory.h"
#include "io/source.h"
#include "tessera/library.h"
#include "tessera/run_lease.h"

namespace tessera {
namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)
using namespace std::chrono_literals;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

const LeaseOptions kShort{.expires = 1s};

std::string text_in(const Store& run, const std::string& name) {
  return to_text(read_all(*run.open(name), 4096));
}

void write(Store& run, const std::string& name, const std::string& text) {
  put(run, name, std::as_bytes(std::span(text)), IfExists::replace);
}

std::vector<std::string> names_in(const Store& run) {
  std::vector<std::string> names;
  for (const auto& object : run.list()) names.push_back(object.name);
  return names;
}

// As a job on another host has it, which gave no sign since.
std::string of_another_host(int signs) {
  // Numbers of processes there say nothing here.
  return "a job of tessera\nexpires 1000 ms\nprocess boot/pid:[1] 4194303 1\n"
         "id 0123456789ab\nhost elsewhere\nsigns " +
         std::to_string(signs) + "\n";
}

TEST(RunLease, OneJobHasTheRunAndGivesItBack) {
  const auto run = memory_store();
  {
    RunLease lease(run);
    EXPECT_EQ(lease.number(), 1);
    lease.require_held();
    EXPECT_FALSE(lease.lost().stop_requested());
    EXPECT_THAT(text_in(*run, "tessera-lease-1.txt"), HasSubstr("expires 60000 ms"));
    const Error error = *failure_of([&] { const RunLease second(run); });
    EXPECT_EQ(error.code(), ErrorCode::conflict);
    EXPECT_THAT(error.what(), HasSubstr("tessera-lease-1.txt"));
    lease.require_held();
  }
  EXPECT_THAT(names_in(*run), ::testing::IsEmpty());
  EXPECT_EQ(RunLease(run).number(), 1);
}

// Of a run that nothing was saved into nothing is left.
TEST(RunLease, LeavesNoDirectoryOfItsOwn) {
  const TemporaryDirectory directory;
  const std::string run = directory.path() + "/run";
  { const RunLease lease(run); }
  EXPECT_FALSE(std::filesystem::exists(run));
  std::filesystem::create_directory(run);
  { const RunLease lease(run); }
  EXPECT_TRUE(std::filesystem::exists(run));
}

// A kill leaves it as it is. On this host that is seen at once.
TEST(RunLease, OfADeadProcessOfThisHostEndsAtOnce) {
  const TemporaryDirectory run;
  const pid_t child = run_process([&] {
    const RunLease lease(run.path());
    ::_exit(0);
    return 1;
  });
  ASSERT_EQ(end_of(child), 0);
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(RunLease(run.path()).number(), 2);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 30s);
}

TEST(RunLease, OfAnotherHostEndsWhenItGivesNoSign) {
  const auto run = memory_store();
  write(*run, "tessera-lease-7.txt", of_another_host(3));
  const auto begin = std::chrono::steady_clock::now();
  RunLease lease(run);
  EXPECT_GE(std::chrono::steady_clock::now() - begin, 1s);
  EXPECT_EQ(lease.number(), 8);
  EXPECT_THAT(names_in(*run), ElementsAre("tessera-lease-8.txt"));
  // It was only stopped, and writes on: that is nothing.
  write(*run, "tessera-lease-7.txt", of_another_host(4));
  lease.require_held();
}

TEST(RunLease, OfAnotherHostThatGivesASignIsConflict) {
  const auto run = memory_store();
  write(*run, "tessera-lease-7.txt", of_another_host(3));
  std::thread other([&] {
    std::this_thread::sleep_for(200ms);
    write(*run, "tessera-lease-7.txt", of_another_host(4));
  });
  const Error error = *failure_of([&] { const RunLease second(run); });
  other.join();
  EXPECT_EQ(error.code(), ErrorCode::conflict);
  EXPECT_THAT(error.what(), HasSubstr("on host elsewhere"));
  EXPECT_THAT(names_in(*run), ElementsAre("tessera-lease-7.txt"));
}

TEST(RunLease, GivesSigns) {
  const auto run = memory_store();
  const RunLease lease(run, kShort);
  const std::string first = text_in(*run, "tessera-lease-1.txt");
  for (int i = 0; i < 100 && text_in(*run, "tessera-lease-1.txt") == first; ++i)
    std::this_thread::sleep_for(50ms);
  EXPECT_NE(text_in(*run, "tessera-lease-1.txt"), first);
}

// A job that was stopped for too long finds that another one has gone on.
TEST(RunLease, ThatIsLostEndsSaves) {
  const auto run = memory_store();
  RunLease lease(run, kShort);
  const Warnings warnings;
  write(*run, "tessera-lease-2.txt", of_another_host(1));
  const Error error = *failure_of([&] { lease.require_held(); });
  EXPECT_EQ(error.code(), ErrorCode::conflict);
  EXPECT_TRUE(lease.lost().stop_requested());
  SaveOptions options;
  options.stop = lease.lost();
  EXPECT_EQ(code_of([&] { save(Value::dict({{"w", 1}}), run, options); }), ErrorCode::cancelled);
  EXPECT_EQ(warnings.texts().size(), 1U);
}

// Its thread finds that by itself, and leaves nothing that could be taken for a lease.
TEST(RunLease, ThatIsLostIsNoticedMeanwhile) {
  const auto run = memory_store();
  const RunLease lease(run, kShort);
  write(*run, "tessera-lease-2.txt", of_another_host(1));
  while (!lease.lost().stop_requested()) std::this_thread::sleep_for(10ms);
  while (names_in(*run).size() > 1) std::this_thread::sleep_for(10ms);
  EXPECT_THAT(names_in(*run), ElementsAre("tessera-lease-2.txt"));
}

// Whoever asks while its thread still says so hears it, too.
TEST(RunLease, ThatIsLostIsLostAtOnce) {
  const auto run = memory_store();
  RunLease lease(run, kShort);
  std::atomic<bool> is_asked = false;
  std::optional<Error> error;
  set_log([&](LogLevel /*level*/, std::string_view /*message*/) {
    if (is_asked) return;
    error = failure_of([&] { lease.require_held(); });
    is_asked = true;
  });
  write(*run, "tessera-lease-2.txt", of_another_host(1));
  while (!is_asked) std::this_thread::sleep_for(10ms);
  set_log(nullptr);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::conflict);
}

// A store that takes nothing any more.
class CutOffStore final : public ForwardingStore {
 public:
  using ForwardingStore::ForwardingStore;
  [[nodiscard]] std::unique_ptr<ByteSink> create(std::string_view name, IfExists if_exists,
                                                 std::uint64_t size_hint) override {
    require_reached();
    return ForwardingStore::create(name, if_exists, size_hint);
  }
  [[nodiscard]] std::vector<ObjectInfo> list_level(std::string_view prefix) const override {
    require_reached();
    return ForwardingStore::list_level(prefix);
  }
  void cut_off() { is_cut_off_ = true; }

 private:
  void require_reached() const {
    if (is_cut_off_) throw Error(ErrorCode::io, "nobody answers");
  }
  std::atomic<bool> is_cut_off_ = false;
};

TEST(RunLease, ThatCannotBeKeptIsLost) {
  const auto store = std::make_shared<CutOffStore>(memory_store());
  RunLease lease(std::static_pointer_cast<Store>(store), kShort);
  store->cut_off();
  const Warnings warnings;
  while (!lease.lost().stop_requested()) std::this_thread::sleep_for(10ms);
  const Error error = *failure_of([&] { lease.require_held(); });
  EXPECT_EQ(error.code(), ErrorCode::conflict);
  EXPECT_THAT(error.what(), HasSubstr("nobody answers"));
}

TEST(RunLease, OfTwoAtOnceOneGoesOn) {
  const TemporaryDirectory directory;
  for (const bool is_on_disk : {true, false}) {
    for (int round = 0; round < 50; ++round) {
      const Location run = is_on_disk ? Location(directory.path() + "/" + std::to_string(round))
                                      : Location(memory_store());
      std::barrier start(2);
      std::vector<std::unique_ptr<RunLease>> taken(2);
      const auto take = [&](std::size_t who) {
        start.arrive_and_wait();
        const auto failure = failure_of([&] { taken.at(who) = std::make_unique<RunLease>(run); });
        if (failure) {
          EXPECT_EQ(failure->code(), ErrorCode::conflict) << failure->what();
        }
      };
      std::thread other([&] { take(1); });
      take(0);
      other.join();
      EXPECT_NE(taken[0] == nullptr, taken[1] == nullptr);
    }
  }
}

TEST(RunLease, OfSeveralRanksIsOne) {
  const auto run = memory_store();
  run_ranks(3, [&](Group& group) {
    RunLease lease(Location(run), group);
    EXPECT_EQ(lease.number(), 1);
    lease.require_held();
    EXPECT_EQ(code_of([&] { const RunLease second(Location(run), group); }), ErrorCode::conflict);
    if (group.rank() == 0) write(*run, "tessera-lease-2.txt", of_another_host(1));
    EXPECT_EQ(code_of([&] { lease.require_held(); }), ErrorCode::conflict);
  });
}

TEST(RunLease, AChildOfForkHasNoPartOfIt) {
  const auto run = memory_store();
  auto lease = std::make_unique<RunLease>(run);
  const pid_t child = run_process([&] {
    const bool is_refused = code_of([&] { lease->require_held(); }) == ErrorCode::invalid_argument;
    lease.reset();
    return is_refused ? 0 : 1;
  });
  EXPECT_EQ(end_of(child), 0);
  lease->require_held();
}

TEST(RunLease, TextsThatNobodyWroteAreCorrupt) {
  const std::string good = of_another_host(1);
  const auto with = [&good](const std::string& from, const std::string& to) {
    std::string text = good;
    return text.replace(text.find(from), from.size(), to);
  };
  for (const std::string& text :
       {std::string(), std::string("x"), std::string("a job of tessera\n"), std::string(5000, 'a'),
        good.substr(0, good.size() - 1), good + "more\n", with("tessera\n", "tesseract\n"),
        with("1000 ms", "no ms"), with("1000 ms", "-1 ms"), with("1000 ms", "1000"),
        with("signs 1", "signs 01"), with("signs 1", "signs 18446744073709551616")}) {
    const auto run = memory_store();
    write(*run, "tessera-lease-3.txt", text);
    const Error error = *failure_of([&] { const RunLease lease(run); });
    EXPECT_EQ(error.code(), ErrorCode::corrupt) << text;
    EXPECT_THAT(error.path(), HasSubstr("tessera-lease-3.txt"));
  }
  const TemporaryDirectory directory;
  std::filesystem::create_symlink("nowhere", directory.path() + "/tessera-lease-1.txt");
  EXPECT_EQ(code_of([&] { const RunLease lease(directory.path()); }), ErrorCode::corrupt);
}

// However often a run was gone on with, and however long its jobs may be silent.
TEST(RunLease, NumbersAreLarge) {
  const auto run = memory_store();
  std::string text = of_another_host(1);
  text.replace(text.find("signs 1"), 7, "signs 99999999999");
  write(*run, "tessera-lease-1048575.txt", text);
  const RunLease lease(run);
  EXPECT_EQ(lease.number(), 1048576);
  EXPECT_EQ(code_of([&] { const RunLease second(run); }), ErrorCode::conflict);
}

// What is made and fails then is not left as held.
TEST(RunLease, ThatFailsWhenItIsMadeIsFree) {
  class NoRemoving final : public ForwardingStore {
   public:
    using ForwardingStore::ForwardingStore;
    void remove(std::string_view /*name*/) override {
      throw Error(ErrorCode::io, "no right to delete");
    }
  };
  const auto inner = memory_store();
  write(*inner, "tessera-lease-1.txt", of_another_host(1));
  EXPECT_EQ(RunLease(std::make_shared<NoRemoving>(inner)).number(), 2);
  std::stop_source stop;
  LeaseOptions options;
  options.stop = stop.get_token();
  stop.request_stop();
  const auto fresh = memory_store();
  EXPECT_EQ(code_of([&] { const RunLease cancelled(fresh, options); }), ErrorCode::cancelled);
  EXPECT_THAT(names_in(*fresh), ::testing::IsEmpty());
}

// Whoever was paused between his look and his lease, while others came and went.
TEST(RunLease, WhoIsLateTakesItFromNobody) {
  class LateStore final : public ForwardingStore {
   public:
    LateStore(std::shared_ptr<Store> inner, std::function<void()> meanwhile)
        : ForwardingStore(std::move(inner)), meanwhile_(std::move(meanwhile)) {}
    [[nodiscard]] std::unique_ptr<ByteSink> create(std::string_view name, IfExists if_exists,
                                                   std::uint64_t size_hint) override {
      if (name.starts_with("tessera-lease-")) std::exchange(meanwhile_, [] {})();
      return ForwardingStore::create(name, if_exists, size_hint);
    }

   private:
    std::function<void()> meanwhile_;
  };
  const auto run = memory_store();
  std::unique_ptr<RunLease> lives;
  const auto late = std::make_shared<LateStore>(run, [&] {
    run->remove("tessera-lease-7.txt");
    lives = std::make_unique<RunLease>(run);
  });
  write(*run, "tessera-lease-7.txt", of_another_host(1));
  EXPECT_EQ(code_of([&] { const RunLease second(std::static_pointer_cast<Store>(late)); }),
            ErrorCode::conflict);
  EXPECT_THAT(names_in(*run), ElementsAre("tessera-lease-1.txt"));
  lives->require_held();
}

// A job that was stopped while its run was taken, and given back, and taken again.
TEST(RunLease, OfTheSameNumberMayBeAnotherJobs) {
  const auto run = memory_store();
  RunLease lease(run, kShort);
  const Warnings warnings;
  write(*run, "tessera-lease-1.txt", of_another_host(1));
  EXPECT_EQ(code_of([&] { lease.require_held(); }), ErrorCode::conflict);
}

// A store that answers late while the other job gives signs.
TEST(RunLease, OfALiveJobIsNotTakenBecauseTheStoreIsSlow) {
  class SlowStore final : public ForwardingStore {
   public:
    using ForwardingStore::ForwardingStore;
    [[nodiscard]] std::vector<ObjectInfo> list_level(std::string_view prefix) const override {
      auto found = ForwardingStore::list_level(prefix);
      std::this_thread::sleep_for(1200ms);
      return found;
    }
  };
  const auto run = memory_store();
  std::atomic<bool> is_over = false;
  std::thread other([&] {
    for (int signs = 1; !is_over; ++signs) {
      write(*run, "tessera-lease-7.txt", of_another_host(signs));
      std::this_thread::sleep_for(166ms);
    }
  });
  const auto slow = std::static_pointer_cast<Store>(std::make_shared<SlowStore>(run));
  std::this_thread::sleep_for(50ms);
  EXPECT_EQ(code_of([&] { const RunLease second(slow); }), ErrorCode::conflict);
  is_over = true;
  other.join();
}

// Nobody hears of the loss from a store that hangs but the clock does.
TEST(RunLease, IsLostInTimeThoughTheStoreHangs) {
  const auto gate = std::make_shared<Gate>();
  class HangingStore final : public ForwardingStore {
   public:
    HangingStore(std::shared_ptr<Store> inner, std::shared_ptr<Gate> gate)
        : ForwardingStore(std::move(inner)), gate_(std::move(gate)) {}
    [[nodiscard]] std::vector<ObjectInfo> list_level(std::string_view prefix) const override {
      if (hangs) gate_->pass();
      return ForwardingStore::list_level(prefix);
    }
    std::atomic<bool> hangs = false;

   private:
    const std::shared_ptr<Gate> gate_;
  };
  const auto store = std::make_shared<HangingStore>(memory_store(), gate);
  {
    const Warnings warnings;
    const RunLease lease(std::static_pointer_cast<Store>(store), kShort);
    store->hangs = true;
    const auto begin = std::chrono::steady_clock::now();
    while (!lease.lost().stop_requested()) std::this_thread::sleep_for(10ms);
    EXPECT_LT(std::chrono::steady_clock::now() - begin, 10s);
  }
  gate->open();
}

TEST(RunLease, StopsWaitingAndRefusesWhatNobodyMeans) {
  const auto run = memory_store();
  write(*run, "tessera-lease-1.txt", of_another_host(3));
  std::stop_source stop;
  stop.request_stop();
  LeaseOptions options;
  options.stop = stop.get_token();
  EXPECT_EQ(code_of([&] { const RunLease lease(run, options); }), ErrorCode::cancelled);
  for (const auto time : {std::chrono::milliseconds(999), std::chrono::milliseconds::max()}) {
    EXPECT_EQ(code_of([&] { const RunLease lease(run, {.expires = time}); }),
              ErrorCode::invalid_argument);
  }
}

}  // namespace
}  // namespace tessera
