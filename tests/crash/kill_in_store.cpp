// Two ranks that save to an object store without end are killed at random moments.
//   kill_in_store URL RUNS SEED
// RUNS in turns as DCP, olmo-full and olmo-local. The ranks are processes; they save step1, step2,
// ... and, in turns, over "same". They are killed together or one by one. Afterwards the newest
// step with a marker is whole and not older than what was reported; so is "same", or it has no
// marker, as an OLMo kind may have none while it is replaced; `gc --uploads` finds what the killed
// uploads left, after which there are none; and the next save of the same place is whole. Prints a
// line for each run that goes wrong and a summary; exits with 1 when one did.
//
// Only children use the store: a client of it does not survive a fork.
#include <signal.h>
#include <sys/wait.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>

#include "five_kinds.h"
#include "multirank/forked_ranks.h"
#include "socket_wire.h"
#include "tessera/checkpoint.h"
#include "tessera/error.h"
#include "tessera/run_directory.h"

namespace {

using namespace tessera;
using testing::Clock;

constexpr CheckpointKind kKinds[] = {CheckpointKind::dcp, CheckpointKind::olmo_full,
                                     CheckpointKind::olmo_local};
constexpr int kRanks = 2;
constexpr std::chrono::milliseconds kSilence{600};
constexpr std::chrono::seconds kLimit{60};

// What processes know of a run, in memory that they share.
struct Board {
  std::atomic<int> saved = 0;  // the last step that rank 0 has saved in both places
  std::atomic<int> begun = 0;
  std::atomic<int> uploads = 0;  // that killed ranks left, in all runs
  char wrong[2000] = "";         // empty: nothing
};
Board* board = nullptr;

struct Run {
  std::string url;
  CheckpointKind kind = CheckpointKind::dcp;
};

// Files of more than one part.
testing::NamedShapes shapes() {
  return {{"a.w", {1537, 2049}}, {"b.bias", {513}}, {"c.w", {1025, 2049}}};
}

SaveOptions options_of(const Run& run) {
  SaveOptions options = testing::options_for_kind(run.kind, true, shapes());
  options.threads = 1;
  return options;
}

void save_as(const Run& run, const std::string& name, int step, Group& group) {
  const Value tree = testing::training_state(group.rank(), group.size(), step, shapes());
  save(tree, run.url + "/" + name, options_of(run), group);
}

int save_without_end(Group& group, const Run& run, int rank) {
  try {
    for (int step = 1;; ++step) {
      if (rank == 0) board->begun = step;
      save_as(run, "same", step, group);
      save_as(run, "step" + std::to_string(step), step, group);
      if (rank == 0) board->saved = step;
    }
  } catch (const Error&) {
    return 0;
  }
}

void require(bool holds, const std::string& what) {
  if (!holds) throw Error(ErrorCode::incomplete, what);
}

// Throws what is wrong with what killed ranks left, and makes it right.
void check_outcome(const Run& run) {
  const auto newest = latest_checkpoint(run.url).found;
  require(newest && newest->step >= board->saved && newest->step <= board->begun,
          "the newest step is not one that was saved last");
  require(testing::number_of(testing::verified_state(to_string(newest->where))) == newest->step,
          "the newest step holds another one");
  const std::string same = run.url + "/same";
  const auto place = open_store(same);
  if (place->exists("config.yaml") || place->exists(".metadata")) {
    const int step = testing::number_of(testing::verified_state(same));
    require(step >= board->saved && step <= board->begun, "what is saved over went back");
  } else {
    require(run.kind != CheckpointKind::dcp, "what is saved over has gone");
  }
  const GcOptions now{.remove = true, .older_than = std::chrono::seconds(0)};
  const GcReport found = gc_uploads(run.url, now);
  board->uploads += static_cast<int>(found.leftovers.size());
  require(gc_uploads(run.url, now).leftovers.empty(), "an upload is left");
  save_as(run, "same", 1'000'000, *solo_group());
  require(testing::number_of(testing::verified_state(same)) == 1'000'000,
          "the next save is not whole");
  for (const ObjectInfo& object : open_store(run.url)->list())
    open_store(run.url)->remove(object.name);
}

testing::Outcome carry_out(const Run& run, const testing::Below& below) {
  board->saved = 0;
  board->begun = 0;
  auto ranks = testing::fork_group(
      kRanks, {.silence = kSilence}, kLimit,
      [&](Group& group, int rank) { return save_without_end(group, run, rank); });
  const auto end = Clock::now() + kLimit;
  while (board->saved == 0 && Clock::now() < end)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  const int milliseconds = below(600);
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
  const int first = below(kRanks);
  const int between = below(2) * below(300);
  for (int i = 0; i < kRanks; ++i) {
    ::kill(ranks[static_cast<std::size_t>((first + i) % kRanks)].process, SIGKILL);
    if (i == 0) std::this_thread::sleep_for(std::chrono::milliseconds(between));
  }
  testing::wait_for(ranks, {.end = Clock::now() + kLimit});
  std::string wrong = testing::end_all(ranks, [](int, int status) {
    return status == 0 || (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
  });
  if (board->saved == 0) wrong += " nothing was saved;";
  if (wrong.empty())
    wrong = testing::looked_at_apart(board->wrong, kLimit, [&] { check_outcome(run); });
  return {std::string(to_string(run.kind)) + ", from rank " + std::to_string(first) + " after " +
              std::to_string(milliseconds) + " ms, " + std::to_string(between) + " ms apart",
          wrong};
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  board = testing::shared_by_processes<Board>();
  int number = 0;
  const int wrong = testing::repeat(
      std::atoi(argv[2]), static_cast<unsigned>(std::atoi(argv[3])),
      [&](const testing::Below& below) {
        const Run run{std::string(argv[1]) + "/run" + std::to_string(number), kKinds[number % 3]};
        ++number;
        return carry_out(run, below);
      });
  std::printf("gc --uploads found %d uploads of killed ranks, and left none\n",
              board->uploads.load());
  return wrong > 0 ? 1 : 0;
}
