// Partners that are gone, stopped or slow while others save beside them.
//   partner_faults COMMAND DIRECTORY RUNS SEED
// COMMAND is `tessera`. 2 to 4 ranks are on two hosts in turns, which are directories of notices
// here; their writer processes have copies of each other's snapshots. Each rank saves four times.
// At a random moment the writer process of one rank, in turns,
//   gone     is killed
//   stopped  is stopped, until all ranks have ended
//   paused   is stopped for less than a silence
//   slow     is stopped for 30 ms of each 50, until all ranks have ended
// None may hang. Beside one that is paused or slow all saves have to be there, whole; of one that
// is gone or stopped every rank has to hear with the save that failed, by its number, and the rank
// that copies from it in the log, too. What is saved in the end is the newest that all heard of.
// Prints a line for each run that goes wrong and a summary; exits with 1 when one did.
#include <signal.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "comm/confer.h"
#include "five_kinds.h"
#include "multirank/forked_ranks.h"
#include "socket_wire.h"
#include "tessera/checkpoint_writer.h"
#include "tessera/error.h"
#include "tessera/library.h"
#include "tessera/restore.h"
#include "tessera/run_directory.h"
#include "writer_processes.h"

namespace {

using namespace tessera;
using std::chrono::milliseconds;
using testing::Clock;
namespace fs = std::filesystem;

constexpr int kMostRanks = 4, kHosts = 2, kSaves = 4;
constexpr milliseconds kSilence{2000};
constexpr std::chrono::seconds kLimit{30};

enum class How { gone, stopped, paused, slow };
constexpr const char* kNames[] = {"gone", "stopped", "paused", "slow"};
constexpr int kWays = 4;

// What processes know of a run, in memory that they share.
struct Board {
  std::atomic<int> begun = 0;               // saves of rank 0
  std::atomic<int> saved[kMostRanks] = {};  // the last step that the rank heard of
  std::atomic<bool> has_failed[kMostRanks] = {};
  std::atomic<bool> is_said = false;  // in the log of who copies from the victim
  std::atomic<pid_t> writers[kMostRanks] = {};
  char failures[kMostRanks][1000] = {};
};

struct Run {
  std::string command, directory;
  How how = How::gone;
  int ranks = 2;
  int victim = 0;

  [[nodiscard]] bool is_lost() const { return how == How::gone || how == How::stopped; }
  [[nodiscard]] std::string run() const { return directory + "/run"; }
  [[nodiscard]] std::string host(int rank) const {
    return directory + "/host" + std::to_string(rank % kHosts);
  }
};

testing::NamedShapes shapes() {
  return {{"a.w", {1537, 129}}, {"b.bias", {513}}};
}

// Whether the log says that nothing is copied from it any more.
bool is_of_victim(const Run& run, std::string_view text) {
  return text.find("no snapshots are copied from rank " + std::to_string(run.victim) + " ") !=
         std::string_view::npos;
}

int train(const Run& run, Group& group, int rank, Board& board) {
  ::setenv("TESSERA_ARENA_DIR", run.host(rank).c_str(), 1);
  set_log([&](LogLevel /*level*/, std::string_view text) {
    if (rank != run.victim && is_of_victim(run, text)) board.is_said = true;
  });
  WriterOptions options;
  options.process = true;
  options.program = run.command;
  options.silence = kSilence;
  options.keep = std::chrono::seconds(60);
  options.partner = 1;
  options.idle = false;
  CheckpointWriter writer(std::shared_ptr<Group>(&group, [](Group*) {}), options);
  board.writers[rank] = testing::only_child();
  const auto failure = failure_of([&] {
    for (int step = 1; step <= kSaves; ++step) {
      if (rank == 0) ++board.begun;
      writer
          .save(testing::training_state(rank, run.ranks, step, shapes()),
                run.run() + "/step" + std::to_string(step))
          .result();
      board.saved[rank] = step;
    }
  });
  if (!failure) return 0;
  std::strncpy(board.failures[rank], failure->what(), sizeof board.failures[rank] - 1);
  board.has_failed[rank] = true;
  // Who copies from it hears after a silence of its own.
  const auto end = Clock::now() + 3 * kSilence;
  while (!board.is_said && Clock::now() < end) std::this_thread::sleep_for(milliseconds(5));
  return 0;
}

// Until all ranks have ended, if it is to last.
void disturb(const Run& run, Board& board, const std::vector<testing::Child>& ranks,
             const testing::Below& below) {
  const int save = 1 + below(kSaves);
  const auto end = Clock::now() + kLimit;
  while (board.begun < save && Clock::now() < end)
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  std::this_thread::sleep_for(std::chrono::microseconds(below(20'000)));
  const pid_t writer = board.writers[run.victim];
  if (writer == 0) return;
  const auto are_over = [&] {
    return std::ranges::all_of(ranks, [](const testing::Child& rank) {
      siginfo_t ended{};
      return ::waitid(P_PID, static_cast<id_t>(rank.process), &ended,
                      WEXITED | WNOHANG | WNOWAIT) != 0 ||
             ended.si_pid != 0;
    });
  };
  if (run.how == How::gone) ::kill(writer, SIGKILL);
  if (run.how == How::stopped || run.how == How::paused) ::kill(writer, SIGSTOP);
  if (run.how == How::paused) {
    std::this_thread::sleep_for(milliseconds(below(static_cast<int>(kSilence.count()) / 2)));
    ::kill(writer, SIGCONT);
  }
  while (run.how == How::slow && !are_over() && Clock::now() < end) {
    ::kill(writer, SIGSTOP);
    std::this_thread::sleep_for(milliseconds(30));
    ::kill(writer, SIGCONT);
    std::this_thread::sleep_for(milliseconds(20));
  }
}

// Says what is wrong with what the ranks have heard; empty: nothing.
std::string wrong_of_ranks(const Run& run, const Board& board) {
  std::string wrong;
  const std::string name = "rank " + std::to_string(run.victim);
  bool has_failed = false;
  for (int rank = 0; rank < run.ranks; ++rank) {
    const std::string said = board.failures[rank];
    has_failed = has_failed || board.has_failed[rank];
    if (!board.has_failed[rank] && board.saved[rank] != kSaves)
      wrong += " rank " + std::to_string(rank) + " has neither saved nor failed;";
    if (board.has_failed[rank] &&
        (!run.is_lost() || (rank != run.victim && said.find(name) == std::string::npos)))
      wrong += " rank " + std::to_string(rank) + " heard: " + said + ";";
    if (board.has_failed[rank] != board.has_failed[0] || board.saved[rank] != board.saved[0])
      wrong += " rank " + std::to_string(rank) + " heard of step " +
               std::to_string(board.saved[rank]) + ", rank 0 of " + std::to_string(board.saved[0]) +
               ";";
  }
  if (run.is_lost() && has_failed && !board.is_said) wrong += " no log names it;";
  return wrong;
}

void require_newest(const Run& run, const Board& board) {
  const auto newest = latest_checkpoint(run.run()).found;
  const int step = newest ? static_cast<int>(newest->step) : 0;
  // What a process commits as it dies nobody may have heard of.
  if (step != board.saved[0] && step != board.saved[0] + 1)
    throw Error(ErrorCode::incomplete, "step " + std::to_string(step) + " is the newest");
  if (step == 0) return;
  for (int rank = 0; rank < 2; ++rank) {
    Value state = testing::training_state(rank, 2, 0, shapes());
    load(state, newest->where);
    if (state != testing::training_state(rank, 2, step, shapes()))
      throw Error(ErrorCode::incomplete, "step " + std::to_string(step) + " is not what was saved");
  }
}

int heard_of = 0;  // runs with saves that failed, because a partner was lost

testing::Outcome carry_out(const Run& run, const testing::Below& below) {
  fs::remove_all(run.directory);
  fs::create_directories(run.run());
  auto* board = testing::shared_by_processes<Board>();
  auto ranks =
      testing::fork_group(run.ranks, {.silence = kSilence}, kLimit,
                          [&](Group& group, int rank) { return train(run, group, rank, *board); });
  disturb(run, *board, ranks, below);
  testing::wait_for(ranks, {.end = Clock::now() + kLimit});
  testing::Outcome outcome{std::string(kNames[static_cast<int>(run.how)]) + ", rank " +
                               std::to_string(run.victim) + " of " + std::to_string(run.ranks),
                           ""};
  outcome.wrong = testing::end_all(ranks, [](int, int status) { return status == 0; });
  if (outcome.wrong.empty()) outcome.wrong = wrong_of_ranks(run, *board);
  if (board->has_failed[0]) ++heard_of;
  for (int host = 0; host < kHosts; ++host)
    for (const pid_t writer : testing::writers_with_arenas_in(run.host(host)))
      ::kill(writer, SIGKILL);
  char wrong[1000];
  outcome.wrong += testing::looked_at_apart(wrong, kLimit, [&] { require_newest(run, *board); });
  return outcome;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  ::setenv("TESSERA_ARENA_IFNAME", "lo", 1);
  int number = 0;
  const int wrong = testing::repeat(std::atoi(argv[3]), static_cast<unsigned>(std::atoi(argv[4])),
                                    [&](const testing::Below& below) {
                                      Run run{.command = argv[1], .directory = argv[2]};
                                      run.how = static_cast<How>(number++ % kWays);
                                      run.ranks = 2 + below(kMostRanks - 1);
                                      run.victim = below(run.ranks);
                                      return carry_out(run, below);
                                    });
  std::printf("in %d a save failed and named who was lost\n", heard_of);
  fs::remove_all(argv[2]);
  return wrong > 0 ? 1 : 0;
}
