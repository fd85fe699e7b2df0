// Hosts that are lost, and the copies that their partners have of their snapshots. A host is here a
// directory in which processes say what they keep: those of another host do not see it.
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "base/testing.h"
#include "checkpoint/background/partner_copies.h"
#include "checkpoint/background/testing.h"
#include "conformance/temporary_directory.h"
#include "five_kinds.h"
#include "multirank/forked_ranks.h"
#include "socket_wire.h"
#include "storage/arena/arenas.h"
#include "tessera/checkpoint_writer.h"
#include "tessera/run_directory.h"

namespace tessera {
namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)
using namespace std::chrono_literals;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;
namespace fs = std::filesystem;

class Partners : public ::testing::Test {
 protected:
  Partners() { ::setenv("TESSERA_ARENA_IFNAME", "lo", 1); }
  ~Partners() override {
    for (int host = 0; host < 4; ++host) lose(host);
    ::unsetenv("TESSERA_ARENA_IFNAME");
    ::unsetenv("TESSERA_ARENA_DIR");
  }
  [[nodiscard]] std::string run() const { return directory_.path() + "/run"; }
  [[nodiscard]] std::string place(int step) const { return run() + "/step" + std::to_string(step); }

  // From now on this process is on that host.
  void go_to(int host) const {
    ::setenv("TESSERA_ARENA_DIR", (directory_.path() + "/host" + std::to_string(host)).c_str(), 1);
  }
  [[nodiscard]] std::vector<KeptPart> kept_on(int host) const {
    go_to(host);
    return kept_parts();
  }
  // All its writer processes end at once.
  void lose(int host) const {
    for (const KeptPart& part : kept_on(host)) ::kill(part.process.pid, SIGKILL);
    while (!kept_parts().empty()) std::this_thread::sleep_for(5ms);
  }

  static WriterOptions with_partner() {
    WriterOptions options = prompt();
    options.process = true;
    options.program = TESSERA_COMMAND;
    options.silence = 2s;
    options.keep = 60s;
    options.partner = 1;
    return options;
  }

  // Ranks on the hosts that these say save a step, and are killed once all copies are there.
  void train_and_die(const std::vector<int>& hosts, int step) {
    const int ranks = static_cast<int>(hosts.size());
    auto* decided = testing::shared_by_processes<std::atomic<int>>();
    auto trainers = testing::fork_group(ranks, {.silence = 5s}, 30s, [&](Group& group, int rank) {
      go_to(hosts[static_cast<std::size_t>(rank)]);
      CheckpointWriter writer(owned(group), with_partner());
      writer.save(testing::training_state(rank, ranks, step), place(step)).result();
      ++*decided;
      ::pause();
      return 0;
    });
    while (*decided < ranks) std::this_thread::sleep_for(5ms);
    const auto parts = [&] {
      std::size_t count = 0;
      for (int host = 0; host < 4; ++host) count += kept_on(host).size();
      return count;
    };
    while (parts() < 2 * static_cast<std::size_t>(ranks)) std::this_thread::sleep_for(5ms);
    testing::kill_all(trainers);
  }

  // Ranks on these hosts start again, and all load that step from memory.
  void expect_restart(const std::vector<int>& hosts, int step) {
    const int ranks = static_cast<int>(hosts.size());
    auto* right = testing::shared_by_processes<std::atomic<int>>();
    *right = 0;
    auto trainers = testing::fork_group(ranks, {.silence = 5s}, 30s, [&](Group& group, int rank) {
      go_to(hosts[static_cast<std::size_t>(rank)]);
      const auto latest = latest_checkpoint(run(), {}, group);
      if (!latest.found || latest.found->step != step) return 1;
      if (!to_string(latest.found->where).starts_with("arena://")) return 2;
      Value state = testing::training_state(rank, ranks, 0);
      load(state, latest.found->where, group);
      if (state == testing::training_state(rank, ranks, step)) ++*right;
      return 0;
    });
    for (const auto& trainer : trainers) {
      int status = 0;
      ::waitpid(trainer.process, &status, 0);
      EXPECT_EQ(WEXITSTATUS(status), 0);
      EXPECT_TRUE(WIFEXITED(status));
    }
    EXPECT_EQ(*right, ranks);
  }

  // What is left is in memory.
  void clear_disk() const {
    for (const auto& entry : fs::directory_iterator(run())) fs::remove_all(entry);
  }

 private:
  const TemporaryDirectory directory_;
};

TEST_F(Partners, AHostThatIsLostIsServedFromItsPartner) {
  train_and_die({0, 0, 1, 1}, 5);
  clear_disk();
  lose(0);
  EXPECT_THAT(kept_on(1), SizeIs(4));
  expect_restart({1}, 5);
  expect_restart({1, 1, 1}, 5);
  expect_restart({2, 1}, 5);     // a new host in the place of the one that is lost
  expect_restart({1, 2, 3}, 5);  // two of them
}

// No host has all of it: each reads what it lacks from others.
TEST_F(Partners, ASnapshotMayLieOnSeveralHosts) {
  train_and_die({0, 1, 2}, 6);
  clear_disk();
  lose(1);
  EXPECT_THAT(kept_on(0), SizeIs(2));
  EXPECT_THAT(kept_on(2), SizeIs(2));
  expect_restart({0, 2}, 6);
  expect_restart({2, 0, 1}, 6);
  lose(2);  // and with it the copy of rank 1
  auto* found = testing::shared_by_processes<std::atomic<bool>>();
  go_to(0);
  *found = latest_checkpoint(run()).found.has_value();
  EXPECT_FALSE(*found);
}

// The copy follows the training, and what was begun over it is none.
TEST_F(Partners, CopiesAreOfTheLastSave) {
  auto* decided = testing::shared_by_processes<std::atomic<int>>();
  auto trainers = testing::fork_group(2, {.silence = 5s}, 30s, [&](Group& group, int rank) {
    go_to(rank);
    CheckpointWriter writer(owned(group), with_partner());
    for (int step = 1; step <= 20; ++step)
      writer.save(testing::training_state(rank, 2, step), place(step)).result();
    ++*decided;
    ::pause();
    return 0;
  });
  while (*decided < 2) std::this_thread::sleep_for(5ms);
  const auto has_last = [&](int host) {
    const auto parts = kept_on(host);
    return parts.size() == 2 &&
           std::ranges::all_of(parts, [&](const auto& part) { return part.place == place(20); });
  };
  while (!has_last(0) || !has_last(1)) std::this_thread::sleep_for(5ms);
  testing::kill_all(trainers);
  for (const int host : {0, 1}) {
    go_to(host);
    EXPECT_EQ(testing::loaded_number("arena://" + place(20)), 20);
  }
}

// What a run has left is left on all its hosts.
TEST_F(Partners, GoingOnFromAnEarlierStepForgetsOnAllHosts) {
  train_and_die({0, 1}, 5);
  auto trainers = testing::fork_group(2, {.silence = 5s}, 30s, [&](Group& group, int rank) {
    go_to(rank);
    go_on_from(run(), 4, group);
    return 0;
  });
  for (const auto& trainer : trainers) ::waitpid(trainer.process, nullptr, 0);
  for (const int host : {0, 1})
    while (!kept_on(host).empty()) std::this_thread::sleep_for(5ms);
}

// A trainer that fails by an exception has died: who starts again needs what it saved.
TEST_F(Partners, AnExceptionLeavesTheSnapshot) {
  auto trainers = testing::fork_group(2, {.silence = 5s}, 30s, [&](Group& group, int rank) {
    go_to(rank);
    try {
      CheckpointWriter writer(owned(group), with_partner());
      writer.save(testing::training_state(rank, 2, 3), place(3)).result();
      throw Error(ErrorCode::peer_failed, "a rank is lost");
    } catch (const Error&) {
      return 0;
    }
  });
  for (const auto& trainer : trainers) ::waitpid(trainer.process, nullptr, 0);
  EXPECT_FALSE(kept_on(0).empty());
  EXPECT_FALSE(kept_on(1).empty());
}

PartnerRank rank_on(const std::string& host) {
  PartnerRank rank;
  rank.host = rank.name = host;
  rank.machine = host.substr(0, 1);
  return rank;
}

TEST(PartnersOf, EachRankHasOneOnTheNextHost) {
  EXPECT_THAT(partners_of({rank_on("a"), rank_on("a")}), Each(-1));
  EXPECT_THAT(partners_of({rank_on("a"), rank_on("a"), rank_on("b"), rank_on("b")}),
              ElementsAre(2, 3, 0, 1));
  EXPECT_THAT(partners_of({rank_on("b"), rank_on("a"), rank_on("b"), rank_on("c"), rank_on("b")}),
              ElementsAre(1, 3, 1, 0, 1));
  EXPECT_THAT(risk_text({rank_on("a"), rank_on("b")}, {1, 0}), IsEmpty());
  EXPECT_EQ(risk_text({rank_on("a1"), rank_on("a2"), rank_on("b")}, {1, 2, 0}), "ranks 0 and 1");
}

// They are for a writer whose processes keep something.
TEST(PartnersOf, OptionsThatMeanNothingAreRefused) {
  WriterOptions options;
  options.partner = 1;
  EXPECT_EQ(code_of([&] { CheckpointWriter writer(options); }), ErrorCode::invalid_argument);
  options.process = true;
  EXPECT_EQ(code_of([&] { CheckpointWriter writer(options); }), ErrorCode::invalid_argument);
  options = {};
  options.keep = 1s;
  EXPECT_EQ(code_of([&] { CheckpointWriter writer(options); }), ErrorCode::invalid_argument);
}

}  // namespace
}  // namespace tessera
