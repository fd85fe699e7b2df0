// One of two nodes, each with a disk of its own, is killed at every step of a save: before each
// call that makes something durable or gives or takes a name.
//   node_steps DIRECTORY
// A rank is a process and a node. Afterwards each node has the older checkpoint or the new one,
// whole; the other rank has ended, and is right if it says that it has saved; ranks restore what is
// of one save, and refuse what is not; and the next save makes both new and leaves nothing beside
// them. Prints a line for each step that goes wrong and a summary; exits with 1 when one did.
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "five_kinds.h"
#include "multirank/forked_ranks.h"
#include "socket_wire.h"
#include "stepping_store.h"
#include "tessera/checkpoint.h"
#include "tessera/error.h"
#include "tessera/restore.h"

namespace {

using namespace tessera;
using testing::Clock;
namespace fs = std::filesystem;

constexpr int kRanks = 2;
constexpr int kAtOnce = 40;   // runs: a rank takes a second and a half to see that it is alone
constexpr int kMost = 1'000;  // runs
constexpr std::chrono::seconds kLimit{20};
const Shape kShape{5, 3};

enum class Said : int { nothing, saved, failed };

// What the processes of a run know, in memory that they share.
struct Board {
  std::atomic<int> steps = 0;  // that the fatal rank has taken
  char last_step[96] = "";
  Said said[kRanks] = {};
  bool is_mixed = false;  // nodes had different saves afterwards
};
Board* boards = nullptr;  // by run

struct Run {
  CheckpointKind kind = CheckpointKind::olmo_local;
  int fatal_rank = 0;
  int fatal_step = 0;  // 0: none
  int number = 0;

  [[nodiscard]] Board& board() const { return boards[number]; }
};

std::string root;  // DIRECTORY

std::string node_in(const std::string& directory, int rank) {
  return directory + "/node" + std::to_string(rank);
}

// As FSDP1 lays it: rank 0 holds 8 elements, rank 1 the rest.
Value model_of(int rank, int number) {
  const auto tensor = [&] { return testing::flat_tensor(kShape, rank, kRanks, number); };
  return Value::dict({{"a.w", tensor()}, {"b.w", tensor()}});
}

void save_there(const std::string& directory, CheckpointKind kind, int number, Group& group) {
  SaveOptions options;
  options.kind = kind;
  options.overwrite = true;
  options.threads = 1;
  options.olmo.units = {{"", {}}, {"a", {"a.w"}}, {"b", {"b.w"}}};
  const Value tree = Value::dict({{"model", model_of(group.rank(), number)},
                                  {"train", Value::dict({{"rank", group.rank()}})}});
  save(tree, node_in(directory, group.rank()) + "/step", options, group);
}

// The checkpoints that a run begins and ends with.
std::string made(CheckpointKind kind, int number) {
  return root + "/" + std::string(to_string(kind)) + std::to_string(number);
}

void make(CheckpointKind kind, int number) {
  run_ranks(kRanks, [&](Group& group) { save_there(made(kind, number), kind, number, group); });
}

std::map<std::string, std::string> files_in(const std::string& directory) {
  std::map<std::string, std::string> files;
  if (!fs::exists(directory)) return files;
  for (const auto& entry : fs::recursive_directory_iterator(directory)) {
    if (!entry.is_regular_file()) continue;
    std::ifstream file(entry.path(), std::ios::binary);
    files[fs::relative(entry.path(), directory)] = {std::istreambuf_iterator<char>(file), {}};
  }
  return files;
}

// The number of the save, of two, that a node has whole; 0: neither.
int number_at(const std::string& node, CheckpointKind kind, int rank) {
  auto files = files_in(node + "/step");
  if (files.erase("tessera-state.json") != 1) return 0;  // has the save's id
  for (const int number : {1, 2}) {
    auto expected = files_in(node_in(made(kind, number), rank) + "/step");
    expected.erase("tessera-state.json");
    if (files == expected) return number;
  }
  return 0;
}

// What both ranks restore; 0: they refuse it as no one save.
int restored(const std::string& directory) {
  std::atomic<int> number = 0;
  try {
    run_ranks(kRanks, [&](Group& group) {
      Value tree = Value::dict({{"model", model_of(group.rank(), -1)}});
      auto found = GroupCheckpoint::open(node_in(directory, group.rank()) + "/step",
                                         tree.at("model"), {}, group);
      found.load(tree);
      const Piece& piece = tree.at("model").at("b.w").as_tensor().pieces.at(0);
      number = static_cast<int>(*reinterpret_cast<const float*>(piece.storage->data));
    });
  } catch (const Error& error) {
    if (error.code() != ErrorCode::mismatch) throw;
  }
  return number;
}

std::string check_outcome(const Run& run, const std::string& directory) {
  const int first = number_at(node_in(directory, 0), run.kind, 0);
  const int second = number_at(node_in(directory, 1), run.kind, 1);
  const std::string have =
      " nodes have " + std::to_string(first) + " and " + std::to_string(second) + ";";
  std::string wrong;
  if (first == 0 || second == 0) return have;
  run.board().is_mixed = first != second;
  for (int rank = 0; rank < kRanks; ++rank) {
    const bool is_killed = run.fatal_step > 0 && rank == run.fatal_rank;
    const Said said = run.board().said[rank];
    if (!is_killed && said == Said::nothing) wrong += " a rank has said nothing;";
    if (said == Said::saved && (first != 2 || second != 2)) wrong += have + " a rank says saved;";
    if (run.fatal_step == 0 && said != Said::saved) wrong += " a save failed;";
  }
  if (restored(directory) != (first == second ? first : 0)) wrong += have + " restored otherwise;";
  run_ranks(kRanks, [&](Group& group) { save_there(directory, run.kind, 2, group); });
  if (restored(directory) != 2) wrong += " the next save is not whole;";
  for (int rank = 0; rank < kRanks; ++rank) {
    for (const auto& entry : fs::directory_iterator(node_in(directory, rank)))
      if (entry.path().filename() != "step") wrong += " something is left;";
  }
  return wrong;
}

int take_part(Group& group, const Run& run, const std::string& directory, int rank) {
  Board& board = run.board();
  if (rank == run.fatal_rank) {
    testing::on_step() = [&](const char* call, std::string_view name) {
      if (run.fatal_step == 0 || board.steps < run.fatal_step)
        std::snprintf(board.last_step, sizeof board.last_step, "%s %.*s", call,
                      static_cast<int>(std::min<std::size_t>(name.size(), 80)), name.data());
      if (++board.steps == run.fatal_step) ::kill(::getpid(), SIGKILL);
    };
  }
  try {
    save_there(directory, run.kind, 2, group);
    board.said[rank] = Said::saved;
  } catch (const Error&) {
    board.said[rank] = Said::failed;
  }
  return 0;
}

std::string carry_out(const Run& run) {
  const std::string directory = root + "/run" + std::to_string(run.number);
  fs::copy(made(run.kind, 1), directory, fs::copy_options::recursive);
  auto children = testing::fork_group(kRanks, {}, kLimit, [&](Group& group, int rank) {
    return take_part(group, run, directory, rank);
  });
  std::string wrong =
      testing::end_with_fatal(children, run.fatal_rank, false, Clock::now() + kLimit);
  if (!wrong.empty()) return wrong;
  try {
    wrong = check_outcome(run, directory);
  } catch (const Error& error) {
    wrong = " " + std::string(error.what()) + ";";
  }
  fs::remove_all(directory);
  return wrong;
}

// In a process of its own.
int carry_out_and_tell(const Run& run) {
  const std::string wrong = carry_out(run);
  if (wrong.empty()) return 0;
  std::printf("%s: rank %d killed at step %d (%s):%s\n", std::string(to_string(run.kind)).c_str(),
              run.fatal_rank, run.fatal_step, run.board().last_step, wrong.c_str());
  std::fflush(stdout);
  return 1;
}

// Returns how many went wrong.
int carry_out_all(const std::vector<Run>& runs) {
  int wrong = 0;
  int running = 0;
  const auto wait_for_one = [&] {
    int status = 0;
    (void)::wait(&status);
    if (status != 0) ++wrong;
    --running;
  };
  for (const Run& run : runs) {
    if (running == kAtOnce) wait_for_one();
    if (::fork() == 0) ::_exit(carry_out_and_tell(run));
    ++running;
  }
  while (running > 0) wait_for_one();
  return wrong;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  root = argv[1];
  fs::remove_all(root);
  fs::create_directories(root);
  boards = testing::shared_by_processes<Board>(kMost);
  std::vector<Run> undisturbed;  // to know how many steps there are
  std::vector<std::jthread> saves;
  for (const CheckpointKind kind : {CheckpointKind::olmo_local, CheckpointKind::olmo_legacy}) {
    for (const int number : {1, 2}) saves.emplace_back(make, kind, number);
    for (int rank = 0; rank < kRanks; ++rank)
      undisturbed.push_back({kind, rank, 0, static_cast<int>(undisturbed.size())});
  }
  saves.clear();  // no thread runs when processes fork
  int wrong = carry_out_all(undisturbed);
  std::vector<Run> runs;
  for (Run run : undisturbed) {
    const int steps = run.board().steps;
    if (steps == 0) ++wrong;
    for (run.fatal_step = 1; run.fatal_step <= steps; ++run.fatal_step) {
      run.number = static_cast<int>(undisturbed.size() + runs.size());
      if (run.number < kMost) runs.push_back(run);
    }
  }
  wrong += carry_out_all(runs);
  fs::remove_all(root);
  const auto mixed =
      std::count_if(runs.begin(), runs.end(), [](const Run& run) { return run.board().is_mixed; });
  std::printf("killed at %zu steps, %td of them between two publications, %d wrong\n", runs.size(),
              mixed, wrong);
  return wrong > 0 ? 1 : 0;
}
