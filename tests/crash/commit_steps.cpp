// Rank 0 of a save is killed, or stopped until the others have given up, at every step that it
// takes in its store: before each call of the store, and inside of these before each call that
// makes something durable or gives or takes a name.
//   commit_steps DIRECTORY
// Three ranks are processes. Afterwards the directory has the older checkpoint or the new one,
// whole; the others have ended soon, and what they say of the outcome is true; the next saves leave
// nothing of what this one wrote. A rank 0 that was stopped before its last look at the group
// commits nothing when it runs again. Prints a line for each step that goes wrong and a summary;
// exits with 1 when one did.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "layout/boxes.h"
#include "multirank/forked_ranks.h"
#include "socket_wire.h"
#include "stepping_store.h"
#include "tessera/checkpoint.h"
#include "tessera/error.h"
#include "tessera/verify.h"

namespace {

using namespace tessera;
using testing::Clock;
namespace fs = std::filesystem;

constexpr int kRanks = 3;
// A rank that is killed is missed at once, one that is stopped after the silence.
constexpr std::chrono::milliseconds kSilence{10'000}, kSilenceOfStopped{600};
constexpr std::chrono::seconds kLimit{20};

enum class Said : int { nothing, saved, failed, unknown };

// What processes know of a run, in memory that they share.
struct Board {
  std::atomic<int> steps = 0;  // that rank 0 has taken, some of them at once
  int first_of_commit = 0;     // the first that makes the side file: all data is there
  bool after_look = false;     // the fatal step is behind rank 0's last look at the group
  char last_step[64] = "";
  Said said[kRanks] = {};
  bool committed[kRanks] = {};  // what committed() says to whom the outcome is unknown
  char error[kRanks][512] = {};
};
Board* board = nullptr;

// State of this process.
bool armed = false;
bool looked = false;  // rank 0 has had its last look at the group
int fatal_step = 0;   // 0: none
int fatal_signal = SIGKILL;

void count_step(const char* call, std::string_view name) {
  if (!armed) return;
  if (std::strcmp(call, "commit") == 0 && name == ".metadata") looked = true;
  if (name.ends_with(".json") && board->first_of_commit == 0)
    board->first_of_commit = board->steps + 1;
  const bool is_over = fatal_step > 0 && board->steps >= fatal_step;
  if (!is_over)
    std::snprintf(board->last_step, sizeof board->last_step, "%s %.*s", call,
                  static_cast<int>(name.size()), name.data());
  if (++board->steps != fatal_step) return;
  board->after_look = looked;
  ::kill(::getpid(), fatal_signal);
}

// Rows of a tensor whose elements are `number`, and the number.
Value tree_of(int rank, int ranks, float number, std::vector<float>& memory) {
  Tensor tensor;
  tensor.shape = {12, 3};
  tensor.sharded = true;
  tensor.placement = Placement{.parts = ranks};
  for (Box& box : boxes_of_part(*tensor.placement, tensor.shape, rank)) {
    memory.assign(static_cast<std::size_t>(numel(box)), number);
    auto storage = std::make_shared<Storage>();
    storage->data = reinterpret_cast<std::byte*>(memory.data());
    storage->size = memory.size() * sizeof(float);
    tensor.pieces.push_back({std::move(box), std::move(storage), 0, {}, -1});
  }
  return Value::dict({{"w", std::move(tensor)}, {"n", number}});
}

SaveOptions replacing() {
  SaveOptions options;
  options.overwrite = true;
  options.threads = 1;
  return options;
}

void save_alone(const std::string& directory, float number) {
  std::vector<float> memory;
  save(tree_of(0, 1, number, memory), directory, replacing());
}

// What a rank learns from the error that ended its save.
Said outcome_of(const std::string& text, const std::string& directory, int rank) {
  std::snprintf(board->error[rank], sizeof board->error[rank], "%s", text.c_str());
  const std::string begin = "whether save ";
  const auto at = text.find(begin);
  if (text.find("is complete, but the other ranks are lost") != std::string::npos)
    return Said::saved;
  if (at == std::string::npos) return Said::failed;
  board->committed[rank] = committed(directory, text.substr(at + begin.size(), 36));
  return Said::unknown;
}

int take_part(Group& group, const std::string& directory, int rank) {
  std::shared_ptr<Store> store = posix_store(directory);
  if (rank == 0) store = std::make_shared<testing::SteppingStore>(store);
  armed = rank == 0;
  testing::on_step() = count_step;
  SaveOptions options = replacing();
  std::vector<float> memory;
  try {
    save(tree_of(rank, kRanks, 2, memory), store, options, group);
    if (rank == 0) count_step("end", "");
    board->said[rank] = Said::saved;
  } catch (const Error& error) {
    armed = false;
    board->said[rank] = outcome_of(error.what(), directory, rank);
  }
  return 0;
}

// The number that the checkpoint there holds, whole; 0: there is none, -1: it is not whole.
int number_in(const std::string& directory) {
  if (!fs::exists(directory + "/.metadata")) return 0;
  if (!verify(directory).findings.empty()) return -1;
  const Checkpoint checkpoint = Checkpoint::open(directory);
  if (!fs::exists(directory + "/tessera-" + checkpoint.save_id + ".json")) return -1;
  const Value tree = checkpoint.load();
  const auto number = static_cast<int>(tree.at("n").as_real());
  const Tensor& tensor = tree.at("w").as_tensor();
  const auto* elements = reinterpret_cast<const float*>(tensor.pieces.at(0).storage->data);
  const bool is_whole = std::all_of(elements, elements + numel(tensor.shape), [&](float element) {
    return element == static_cast<float>(number);
  });
  return is_whole ? number : -1;
}

// What is wrong with what a rank says; empty: nothing.
std::string check_rank(int rank, bool is_new, bool was_stopped) {
  const std::string who = " rank " + std::to_string(rank);
  const std::string error = board->error[rank];
  // One that was stopped may commit behind the back of the others, after its last look at them.
  const bool was_late = was_stopped && board->after_look;
  switch (board->said[rank]) {
    case Said::saved:
      return is_new ? "" : who + " says that it is saved;";
    case Said::failed:
      if (rank != 0 && error.find("rank 0") == std::string::npos) return who + ": " + error;
      return is_new ? who + " says that it is not saved: " + error : "";
    case Said::unknown:
      if (rank != 0 && error.find("rank 0") == std::string::npos) return who + ": " + error;
      return board->committed[rank] == is_new || was_late ? "" : who + " heard a wrong answer;";
    default:
      return who + " has said nothing;";
  }
}

struct Run {
  std::string directory;
  bool replaces = false;
  int fatal_step = 0;
  int signal = SIGKILL;
};

std::string check_outcome(const Run& run) {
  const int number = number_in(run.directory);
  const bool is_new = number == 2;
  if (number != 2 && number != (run.replaces ? 1 : 0))
    return " the directory holds " + std::to_string(number) + ";";
  std::string wrong;
  const bool is_stopped = run.signal == SIGSTOP;
  for (int rank = is_stopped ? 0 : 1; rank < kRanks; ++rank)
    wrong += check_rank(rank, is_new, is_stopped);
  if (is_stopped && board->said[0] == Said::unknown) wrong += " rank 0 does not know the outcome;";
  if (is_stopped && is_new && !board->after_look) wrong += " it committed when it ran again;";
  // Two saves later there are files of these two alone: data, side file, and one .metadata.
  save_alone(run.directory, 3);
  save_alone(run.directory, 4);
  const auto files = std::distance(fs::directory_iterator(run.directory), {});
  if (files != 5) wrong += " it left something: " + std::to_string(files) + " files;";
  return wrong;
}

std::string carry_out(const Run& run) {
  fs::remove_all(run.directory);
  fs::create_directories(run.directory);
  if (run.replaces) save_alone(run.directory, 1);
  std::destroy_at(board);
  std::construct_at(board);
  fatal_step = run.fatal_step;
  fatal_signal = run.signal;
  const bool is_stopped = run.signal == SIGSTOP;
  auto children = testing::fork_group(
      kRanks, {.silence = is_stopped ? kSilenceOfStopped : kSilence}, kLimit,
      [&](Group& group, int rank) { return take_part(group, run.directory, rank); });
  fatal_step = 0;
  const std::string wrong = testing::end_with_fatal(children, 0, is_stopped, Clock::now() + kLimit);
  return wrong.empty() ? check_outcome(run) : wrong;
}

struct Count {
  int steps = 0;
  int wrong = 0;
  std::chrono::duration<double> longest{};
};

void count(const Run& run, Count& all) {
  const auto begin = Clock::now();
  const std::string wrong = carry_out(run);
  all.longest = std::max<std::chrono::duration<double>>(all.longest, Clock::now() - begin);
  ++all.steps;
  if (wrong.empty()) return;
  ++all.wrong;
  std::printf("%s at step %d (%s), %s:%s\n", run.signal == SIGKILL ? "killed" : "stopped",
              run.fatal_step, board->last_step, run.replaces ? "replacing" : "new", wrong.c_str());
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  board = testing::shared_by_processes<Board>();
  Count killed, stopped;
  int steps = 0, first_of_commit = 0;
  for (const bool replaces : {false, true}) {
    Run run{.directory = argv[1], .replaces = replaces};
    count(run, killed);  // nothing happens: how many steps there are
    steps = board->steps;
    first_of_commit = board->first_of_commit;
    for (run.fatal_step = 1; run.fatal_step <= steps; ++run.fatal_step) count(run, killed);
  }
  Run run{.directory = argv[1], .replaces = true, .signal = SIGSTOP};
  for (run.fatal_step = first_of_commit; run.fatal_step <= steps; ++run.fatal_step)
    count(run, stopped);
  fs::remove_all(argv[1]);
  std::printf("killed at %d steps, stopped at %d; %d and %d wrong; the longest took %.1f s\n",
              killed.steps, stopped.steps, killed.wrong, stopped.wrong,
              std::max(killed.longest, stopped.longest).count());
  return killed.wrong + stopped.wrong > 0 ? 1 : 0;
}
