// One of two ranks is killed at every step of a save over an older one: before each call that makes
// something durable or gives or takes a name. Saves of every kind go into one directory; those of
// kinds with files of ranks also onto nodes that have a disk each.
//   node_steps DIRECTORY
// A rank is a process, and a node where these have disks of their own. Afterwards a directory has
// the older checkpoint or the new one, whole, and the notes that somebody has put beside it; the
// other rank has ended, and is right if it says that it has saved, or that it has not; ranks
// restore what is of one save, and refuse what is not; and the next save makes all new and leaves
// nothing beside it. Prints a line for each step that goes wrong and a summary; exits with 1 when
// one did.
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
#include "tessera/library.h"
#include "tessera/restore.h"
#include "tessera/verify.h"

namespace {

using namespace tessera;
using testing::Clock;
namespace fs = std::filesystem;

constexpr int kRanks = 2;
constexpr int kAtOnce = 40;   // runs: a rank takes a second and a half to see that it is alone
constexpr int kMost = 4'000;  // runs
constexpr std::chrono::seconds kLimit{20};
const Shape kShape{5, 3};
constexpr const char* kNotes = "notes.txt";

// `unknown`: whether the save is complete.
enum class Said : int { nothing, saved, failed, unknown };

// What the processes of a run know, in memory that they share.
struct Board {
  std::atomic<int> steps = 0;  // that the fatal rank has taken
  char last_step[96] = "";
  Said said[kRanks] = {};
  char error[kRanks][512] = {};
  bool is_new = false;    // all have the new save afterwards
  bool is_mixed = false;  // nodes had different saves afterwards
};
Board* boards = nullptr;  // by run

// What is saved, and whether into one directory.
struct Kind {
  CheckpointKind kind = CheckpointKind::olmo_local;
  bool is_shared = false;

  [[nodiscard]] std::string name() const {
    return std::string(to_string(kind)) + (is_shared ? "" : " of nodes");
  }
};

constexpr Kind kKinds[] = {
    {CheckpointKind::dcp, true},          {CheckpointKind::safetensors, true},
    {CheckpointKind::olmo_full, true},    {CheckpointKind::olmo_torch_new, true},
    {CheckpointKind::olmo_legacy, true},  {CheckpointKind::olmo_local, true},
    {CheckpointKind::olmo_legacy, false}, {CheckpointKind::olmo_local, false}};

struct Run {
  Kind kind;
  int fatal_rank = 0;
  int fatal_step = 0;  // 0: none
  int number = 0;

  [[nodiscard]] Board& board() const { return boards[number]; }
};

std::string root;  // DIRECTORY

// Where a rank saves.
std::string place_in(const std::string& directory, Kind kind, int rank) {
  return directory + "/node" + std::to_string(kind.is_shared ? 0 : rank);
}

// As FSDP1 lays it: rank 0 holds 8 elements, rank 1 the rest.
Value model_of(int rank, int number) {
  const auto tensor = [&] { return testing::flat_tensor(kShape, rank, kRanks, number); };
  return Value::dict({{"a.w", tensor()}, {"b.w", tensor()}});
}

void save_there(const std::string& directory, Kind kind, int number, Group& group) {
  SaveOptions options;
  options.kind = kind.kind;
  options.overwrite = true;
  options.threads = 1;
  Value tree = Value::dict({{"model", model_of(group.rank(), number)}});
  if (kind.kind == CheckpointKind::safetensors) {
    options.safetensors = SafetensorsSet{{{"model.a.w", 1}, {"model.b.w", 2}}};
  } else if (kind.kind != CheckpointKind::dcp) {
    options.olmo.units = {{"", {}}, {"a", {"a.w"}}, {"b", {"b.w"}}};
    tree.set_item("train", Value::dict({{"rank", group.rank()}, {"number", number}}));
  }
  save(tree, place_in(directory, kind, group.rank()) + "/step", options, group);
}

// The checkpoints that a run begins and ends with.
std::string made(Kind kind, int number) {
  return root + "/" + kind.name() + std::to_string(number);
}

void make(Kind kind, int number) {
  run_ranks(kRanks, [&](Group& group) { save_there(made(kind, number), kind, number, group); });
  for (int rank = 0; rank < kRanks && number == 1; ++rank)
    std::ofstream(place_in(made(kind, 1), kind, rank) + "/step/" + kNotes) << "years";
}

using Files = std::map<std::string, std::string>;

Files files_in(const std::string& directory) {
  Files files;
  if (!fs::exists(directory)) return files;
  for (const auto& entry : fs::recursive_directory_iterator(directory)) {
    if (!entry.is_regular_file()) continue;
    std::ifstream file(entry.path(), std::ios::binary);
    files[fs::relative(entry.path(), directory)] = {std::istreambuf_iterator<char>(file), {}};
  }
  return files;
}

// What both ranks load; 0: they refuse it as no one save.
int loaded(const std::string& directory, Kind kind) {
  std::atomic<int> number = 0;
  try {
    run_ranks(kRanks, [&](Group& group) {
      Value tree = Value::dict({{"model", model_of(group.rank(), -1)}});
      auto found = GroupCheckpoint::open(place_in(directory, kind, group.rank()) + "/step",
                                         tree.at("model"), {}, group);
      found.load(tree);
      for (const char* name : {"a.w", "b.w"}) {
        const Piece& piece = tree.at("model").at(name).as_tensor().pieces.at(0);
        const auto element = static_cast<int>(*reinterpret_cast<const float*>(piece.storage->data));
        if (number != 0 && number != element)
          throw Error(ErrorCode::corrupt, "elements of two saves");
        number = element;
      }
    });
  } catch (const Error& error) {
    if (error.code() != ErrorCode::mismatch) throw;
  }
  return number;
}

// The same of kinds whose files have names that are drawn.
int verified_number_at(const std::string& directory, Kind kind) {
  const VerifyReport report = verify(place_in(directory, kind, 0) + "/step");
  return report.findings.empty() ? loaded(directory, kind) : 0;
}

// The number of the save, of two, that a rank's directory has whole; 0: neither.
int number_at(const std::string& directory, Kind kind, int rank) {
  const bool draws_names =
      kind.kind == CheckpointKind::dcp || kind.kind == CheckpointKind::olmo_torch_new;
  if (draws_names) return verified_number_at(directory, kind);
  Files files = files_in(place_in(directory, kind, rank) + "/step");
  const bool has_state = files.erase("tessera-state.json") == 1;  // has the save's id
  if (has_state != (kind.kind != CheckpointKind::safetensors)) return 0;
  for (const int number : {1, 2}) {
    Files expected = files_in(place_in(made(kind, number), kind, rank) + "/step");
    expected.erase("tessera-state.json");
    expected[kNotes] = "years";
    if (files == expected) return number;
  }
  return 0;
}

// What is wrong with what a rank says that was not killed.
std::string check_rank(const Run& run, int rank) {
  const Board& board = run.board();
  const std::string who = " rank " + std::to_string(rank);
  const bool is_new = board.is_new;
  switch (board.said[rank]) {
    case Said::nothing:
      return who + " has said nothing;";
    case Said::saved:
      return is_new ? "" : who + " says saved;";
    case Said::failed:
      return is_new || run.fatal_step == 0 ? who + " says failed: " + board.error[rank] : "";
    default:
      return "";
  }
}

std::string check_outcome(const Run& run, const std::string& directory) {
  const int first = number_at(directory, run.kind, 0);
  const int second = number_at(directory, run.kind, 1);
  const std::string have =
      " there are " + std::to_string(first) + " and " + std::to_string(second) + ";";
  if (first == 0 || second == 0) return have;
  run.board().is_mixed = first != second;
  run.board().is_new = first == 2 && second == 2;
  std::string wrong;
  for (int rank = 0; rank < kRanks; ++rank) {
    const bool is_killed = run.fatal_step > 0 && rank == run.fatal_rank;
    const std::string of_rank = is_killed ? "" : check_rank(run, rank);
    if (!of_rank.empty()) wrong += have + of_rank;
  }
  if (loaded(directory, run.kind) != (first == second ? first : 0))
    wrong += have + " loaded otherwise;";
  run_ranks(kRanks, [&](Group& group) { save_there(directory, run.kind, 2, group); });
  if (loaded(directory, run.kind) != 2) wrong += " the next save is not whole;";
  for (int rank = 0; rank < kRanks; ++rank) {
    const std::string place = place_in(directory, run.kind, rank);
    if (!fs::exists(place + "/step/" + kNotes)) wrong += " the notes are gone;";
    for (const auto& entry : fs::directory_iterator(place))
      if (entry.path().filename() != "step") wrong += " something is left;";
  }
  return wrong;
}

// What a rank learns from the error that ended its save. A node that has published its part knows
// nothing of the others.
Said said_by(const std::string& error) {
  if (error.find("the part of this node") != std::string::npos) return Said::unknown;
  if (error.find("is complete, but the other ranks are lost") != std::string::npos)
    return Said::saved;
  return error.find("is not known here") == std::string::npos ? Said::failed : Said::unknown;
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
  } catch (const Error& error) {
    board.said[rank] = said_by(error.what());
    std::snprintf(board.error[rank], sizeof board.error[rank], "%s", error.what());
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
  std::printf("%s: rank %d killed at step %d (%s):%s\n", run.kind.name().c_str(), run.fatal_rank,
              run.fatal_step, run.board().last_step, wrong.c_str());
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
  set_log([](LogLevel, std::string_view) {});  // of values that differ, for each run
  fs::remove_all(root);
  fs::create_directories(root);
  boards = testing::shared_by_processes<Board>(kMost);
  std::vector<Run> undisturbed;  // to know how many steps there are
  std::vector<std::jthread> saves;
  for (const Kind kind : kKinds) {
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
