// Ranks that save OLMo's kinds without end are killed, or one of them is stopped, at random
// moments.
//   kill_olmo DIRECTORY RUNS SEED
// RUNS for each kind. Two or three ranks are processes; they save step1, step2, ... and, in turns,
// over "same"; half of the runs copy each step to a second directory. They are killed together, one
// by one, or one of them is stopped until the others have given up. Afterwards every directory that
// has its name is one save, whole, with the digests that lie beside it; the newest one is not older
// than what was reported; of the copies everything with a config.yaml is whole; survivors have
// ended soon; and the next save leaves nothing beside its directory. Prints a line for each run
// that goes wrong and a summary for each kind; exits with 1 when one did.
#include <signal.h>
#include <sys/wait.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "five_kinds.h"
#include "multirank/forked_ranks.h"
#include "socket_wire.h"
#include "tessera/checkpoint.h"
#include "tessera/copy.h"
#include "tessera/error.h"
#include "tessera/verify.h"

namespace {

using namespace tessera;
using testing::Clock;
namespace fs = std::filesystem;

constexpr CheckpointKind kKinds[] = {CheckpointKind::olmo_full, CheckpointKind::olmo_torch_new,
                                     CheckpointKind::olmo_legacy, CheckpointKind::olmo_local};
constexpr std::chrono::milliseconds kSilence{600};
constexpr std::chrono::seconds kLimit{20};

// What processes know of a run, in memory that they share.
struct Board {
  std::atomic<int> saved = 0;  // the last step that rank 0 has saved in both places
  std::atomic<int> begun = 0;
};
Board* board = nullptr;

struct Run {
  std::string directory;
  CheckpointKind kind = CheckpointKind::olmo_full;
  int ranks = 2;
  bool uploads = false;
};

// Large enough that a kill finds a save at work.
testing::NamedShapes shapes() {
  return {{"a.w", {515, 257}}, {"b.bias", {513}}, {"c.w", {515, 257}}};
}

Value tree_of(int rank, int ranks, int step) {
  Value tree = testing::training_state(rank, ranks, step, shapes());
  tree.at("train").set_item("rank", rank);
  return tree;
}

SaveOptions options_of(const Run& run) {
  SaveOptions options = testing::options_for_kind(run.kind, true, shapes());
  options.threads = 1;
  return options;
}

void save_and_copy(const Run& run, const std::string& name, int rank, int step, Group& group) {
  const std::string path = run.directory + "/" + name;
  save(tree_of(rank, run.ranks, step), path, options_of(run), group);
  if (!run.uploads) return;
  const std::string copy = run.directory + "/remote/" + name;
  upload(path, copy, {.overwrite = true, .threads = 1}, group);
}

int save_without_end(Group& group, const Run& run, int rank) {
  try {
    for (int step = 1;; ++step) {
      if (rank == 0) board->begun = step;
      save_and_copy(run, "same", rank, step, group);
      save_and_copy(run, "step" + std::to_string(step), rank, step, group);
      if (rank == 0) board->saved = step;
    }
  } catch (const Error&) {
    return 0;
  }
}

// The step that the whole checkpoint at `path` is of. Throws what is wrong with it.
int step_in(const std::string& path) {
  const Value tree = testing::verified_state(path);
  const Value model = Value::dict({{"model", tree.at("model")}});
  const auto group = solo_group();
  const StateDigests saved = saved_digests(*posix_store(path));
  for (const auto& [name, crc] : state_digests(model, *group)) {
    const auto found = saved.find(name);
    if (found == saved.end() || found->second != crc)
      throw Error(ErrorCode::corrupt, "another digest than the saved one")
          .at_path(path)
          .at_key(name);
  }
  return testing::number_of(tree);
}

// What is wrong with the directories of a run; empty: nothing.
std::string check_outcome(const Run& run) {
  std::string wrong;
  int newest = 0;
  const auto look = [&](const fs::path& path) {
    try {
      newest = std::max(newest, step_in(path.string()));
    } catch (const Error& error) {
      wrong += " " + std::string(error.what()) + ";";
    }
  };
  for (const auto& entry : fs::directory_iterator(run.directory)) {
    const std::string name = entry.path().filename().string();
    if (name != "remote" && name.find("-tmp-") == std::string::npos) look(entry.path());
  }
  if (newest < board->saved)
    wrong += " step " + std::to_string(board->saved) + " was saved, " + std::to_string(newest) +
             " is the newest;";
  if (newest > board->begun) wrong += " a step that nobody has begun;";
  const fs::path remote = run.directory + "/remote";
  if (!fs::exists(remote)) return wrong;
  for (const auto& entry : fs::directory_iterator(remote))
    if (fs::exists(entry.path() / "config.yaml")) look(entry.path());
  return wrong;
}

// The next save finds its way, and clears away what the killed ones left beside it.
std::string save_again(const Run& run) {
  Run alone = run;
  alone.ranks = 1;
  const auto group = solo_group();
  try {
    save_and_copy(alone, "same", 0, 1'000'000, *group);
    if (step_in(run.directory + "/same") != 1'000'000) return " the next save is not there;";
  } catch (const Error& error) {
    return " the next save failed: " + std::string(error.what()) + ";";
  }
  for (const auto& entry : fs::directory_iterator(run.directory))
    if (entry.path().filename().string().starts_with("same-tmp-")) return " something is left;";
  return "";
}

enum class How { together, one_by_one, stopped };

struct Draw {
  How how = How::together;
  int first = 0;  // of the ranks
  int milliseconds = 0;
};

void strike(std::vector<testing::Child>& children, const Draw& draw, const testing::Below& below) {
  const int ranks = static_cast<int>(children.size());
  if (draw.how == How::stopped) {
    ::kill(children[static_cast<std::size_t>(draw.first)].process, SIGSTOP);
    return;
  }
  for (int i = 0; i < ranks; ++i) {
    ::kill(children[static_cast<std::size_t>((draw.first + i) % ranks)].process, SIGKILL);
    if (draw.how == How::one_by_one)
      std::this_thread::sleep_for(std::chrono::milliseconds(below(300)));
  }
}

testing::Outcome carry_out(const Run& run, const testing::Below& below) {
  fs::remove_all(run.directory);
  fs::create_directories(run.directory);
  board->saved = 0;
  board->begun = 0;
  auto children = testing::fork_group(
      run.ranks, {.silence = kSilence}, kLimit,
      [&](Group& group, int rank) { return save_without_end(group, run, rank); });
  const Draw draw{static_cast<How>(below(3)), below(run.ranks), below(400)};
  const auto end = Clock::now() + kLimit;
  while (board->saved == 0 && Clock::now() < end)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  std::this_thread::sleep_for(std::chrono::milliseconds(draw.milliseconds));
  strike(children, draw, below);
  const bool is_stopped = draw.how == How::stopped;
  testing::wait_for(children,
                    {.end = Clock::now() + kLimit, .without = is_stopped ? draw.first : -1});
  std::string wrong = check_outcome(run);
  if (is_stopped) {
    // It may have been behind its last look at the others: then it commits when it runs again.
    ::kill(children[static_cast<std::size_t>(draw.first)].process, SIGCONT);
    testing::wait_for(children, {.end = Clock::now() + kLimit});
    wrong += check_outcome(run);
  }
  wrong += testing::end_all(children, [](int, int status) {
    return status == 0 || (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
  });
  if (wrong.empty()) wrong = save_again(run);
  const char* how[] = {"together", "one by one", "stopped"};
  return {std::string(to_string(run.kind)) + " by " + std::to_string(run.ranks) +
              (run.uploads ? " with copies, " : ", ") + how[static_cast<int>(draw.how)] + " from " +
              std::to_string(draw.first) + " after " + std::to_string(draw.milliseconds) + " ms",
          wrong};
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  board = testing::shared_by_processes<Board>();
  int wrong = 0;
  for (const CheckpointKind kind : kKinds) {
    std::printf("%s: ", std::string(to_string(kind)).c_str());
    std::fflush(stdout);
    int number = 0;
    wrong += testing::repeat(std::atoi(argv[2]), static_cast<unsigned>(std::atoi(argv[3])),
                             [&](const testing::Below& below) {
                               const int ranks = 2 + below(2);
                               return carry_out({argv[1], kind, ranks, ++number % 2 == 0}, below);
                             });
  }
  fs::remove_all(argv[1]);
  return wrong > 0 ? 1 : 0;
}
