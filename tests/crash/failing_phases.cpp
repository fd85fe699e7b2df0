// One of 2 to 8 ranks is killed or stopped in each phase of a save by name, while it replaces a
// checkpoint of any kind of directory (fault-rows R01, R02, R03).
//   failing_phases DIRECTORY MOST SEED
// MOST runs of each kind in which a rank is killed, and a fourth of that in which it is stopped (0:
// all). The others name the rank, soon; the directory holds the old checkpoint or the new one, as
// the phase says, whole; what ranks say of it is true; the next save, by another number of ranks,
// works and leaves nothing of this one (R10). Prints a line for each run that goes wrong and one
// for each kind; exits with 1 when one did.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <random>
#include <string>
#include <vector>

#include "five_kinds.h"
#include "multirank/forked_ranks.h"
#include "socket_wire.h"

namespace {

using namespace tessera;
using testing::Clock;
namespace fs = std::filesystem;

constexpr int kMostRanks = 8;
constexpr std::chrono::milliseconds kSilence{10'000}, kSilenceOfStopped{600};
constexpr std::chrono::seconds kLimit{25};
constexpr const char* kPhases[] = {"plan", "writing", "write", "commit", "all"};

struct Run {
  CheckpointKind kind = CheckpointKind::dcp;
  int ranks = 2;
  int victim = 0;
  const char* phase = "";  // the victim fails when it has ended it; "writing": inside of "write"
  int signal = SIGKILL;
};

// What processes say, in memory that they share.
struct Board {
  bool saved[kMostRanks];
  bool asked[kMostRanks];  // what committed() says to whom the outcome is not known
  char error[kMostRanks][1024];
};
Board* board = nullptr;
std::string target;

std::string describe(const Run& run) {
  return std::string(to_string(run.kind)) + ", rank " + std::to_string(run.victim) + " of " +
         std::to_string(run.ranks) + (run.signal == SIGKILL ? " killed" : " stopped") + " at '" +
         run.phase + "'";
}

// Behind the commit that rank has passed, the new checkpoint is there.
bool is_committed_before(const Run& run) {
  return std::strcmp(run.phase, "commit") == 0 || std::strcmp(run.phase, "all") == 0;
}

int take_part(Group& group, const Run& run, int rank) {
  SaveOptions options = testing::options_for_kind(run.kind, true);
  bool is_reached = false;
  const auto reach = [&](std::string_view phase) {
    if (rank != run.victim || phase != run.phase || is_reached) return;
    is_reached = true;
    ::kill(::getpid(), run.signal);
  };
  options.events = [&](const Event& event) { reach(event.phase); };
  options.progress = [&](const Progress&) { reach("writing"); };
  try {
    save(testing::training_state(rank, run.ranks, 2), target, options, group);
    board->saved[rank] = true;
    group.barrier();  // whoever is lost behind the save is missed here
  } catch (const std::exception& error) {
    std::snprintf(board->error[rank], sizeof board->error[rank], "%s", error.what());
    const std::string text = error.what(), begin = "whether save ";
    const auto at = text.find(begin);
    if (at != std::string::npos)
      board->asked[rank] = committed(target, text.substr(at + begin.size(), 36));
  }
  return 0;
}

std::string check_rank(const Run& run, int rank) {
  const std::string text = board->error[rank], who = " rank " + std::to_string(rank);
  const bool is_new = is_committed_before(run);
  if (text.empty()) return who + " has missed nobody;";
  if (text.find("rank " + std::to_string(run.victim)) == std::string::npos)
    return who + " names nobody: " + text;
  if (board->saved[rank]) return is_new ? "" : who + " says that it is saved;";
  if (text.find("whether save ") != std::string::npos)
    return board->asked[rank] == is_new ? "" : who + " heard a wrong answer;";
  const bool says_it_is = text.find("is complete") != std::string::npos;
  return says_it_is == is_new ? "" : who + " says what is not true: " + text;
}

std::string check_directory(const Run& run) {
  try {
    const int expected = is_committed_before(run) ? 2 : 1;
    if (testing::number_at(target) != expected) return " it holds the other checkpoint;";
    save(testing::training_state(0, 1, 3), target, testing::options_for_kind(run.kind, true));
    if (testing::number_at(target) != 3) return " the next one is not there;";
  } catch (const std::exception& error) {
    return " " + std::string(error.what()) + ";";
  }
  const fs::path run_directory = fs::path(target).parent_path();
  const auto entries = std::distance(fs::directory_iterator(run_directory), {});
  return entries == 1 ? "" : " the next save leaves " + std::to_string(entries) + " entries;";
}

std::string carry_out(const Run& run) {
  fs::remove_all(target);
  save(testing::training_state(0, 1, 1), target, testing::options_for_kind(run.kind, true));
  std::memset(static_cast<void*>(board), 0, sizeof *board);
  const auto silence = run.signal == SIGKILL ? kSilence : kSilenceOfStopped;
  auto children =
      testing::fork_group(run.ranks, {.silence = silence}, kLimit,
                          [&](Group& group, int rank) { return take_part(group, run, rank); });
  std::string wrong;
  const auto check_others = [&] {
    for (int rank = 0; rank < run.ranks; ++rank)
      if (rank != run.victim) wrong += check_rank(run, rank);
  };
  const auto ended = testing::end_with_fatal(children, run.victim, run.signal == SIGSTOP,
                                             Clock::now() + kLimit, check_others);
  return wrong + ended + check_directory(run);
}

std::vector<Run> runs_of(CheckpointKind kind, int signal) {
  std::vector<Run> runs;
  for (const int ranks : {2, 4, 8}) {
    if (signal == SIGSTOP && ranks > 2) continue;  // each takes the silence
    for (const char* phase : kPhases)
      for (int victim = 0; victim < ranks; ++victim)
        runs.push_back({kind, ranks, victim, phase, signal});
  }
  return runs;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  board = testing::shared_by_processes<Board>();
  target = std::string(argv[1]) + "/step4";
  const auto most = static_cast<std::size_t>(std::atoi(argv[2]));
  std::mt19937 random(static_cast<unsigned>(std::atoi(argv[3])));
  int all_wrong = 0;
  for (const CheckpointKind kind : testing::kFiveKinds) {
    for (const int signal : {SIGKILL, SIGSTOP}) {
      std::vector<Run> runs = runs_of(kind, signal);
      std::ranges::shuffle(runs, random);
      const std::size_t wanted = signal == SIGKILL ? most : (most + 3) / 4;
      if (most > 0 && runs.size() > wanted) runs.resize(wanted);
      int wrong = 0;
      double longest = 0;
      for (const Run& run : runs) {
        const auto begin = Clock::now();
        const std::string text = carry_out(run);
        longest = std::max(longest, std::chrono::duration<double>(Clock::now() - begin).count());
        if (text.empty()) continue;
        ++wrong;
        std::printf("%s:%s\n", describe(run).c_str(), text.c_str());
      }
      std::printf("%s, %s in %zu runs: %d wrong, the longest took %.1f s\n",
                  std::string(to_string(kind)).c_str(),
                  signal == SIGKILL ? "R01, R03 killed" : "R02, R03 stopped", runs.size(), wrong,
                  longest);
      std::fflush(stdout);
      all_wrong += wrong;
    }
  }
  fs::remove_all(argv[1]);
  return all_wrong > 0 ? 1 : 0;
}
