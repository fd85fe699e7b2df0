// A rank of an upload is killed, or stopped until the others have given up, at every step that it
// takes at the target: before each call of the store, and inside of these before each call that
// makes something durable or gives or takes a name.
//   upload_steps DIRECTORY
// Three ranks are processes. Afterwards the target has a marker only if the older checkpoint or the
// new one is there, whole; the others have ended soon; who says that it is uploaded is right; and
// the next upload leaves nothing but what it has copied. Prints a line for each step that goes
// wrong and a summary; exits with 1 when one did.
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "multirank/forked_ranks.h"
#include "socket_wire.h"
#include "stepping_store.h"
#include "tessera/checkpoint.h"
#include "tessera/convert.h"
#include "tessera/copy.h"
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

enum class Said : int { nothing, uploaded, failed };

// What processes know of a run, in memory that they share.
struct Board {
  std::atomic<int> steps = 0;  // that the fatal rank has taken
  char last_step[96] = "";
  Said said[kRanks] = {};
  char error[kRanks][512] = {};
};
Board* board = nullptr;

struct Run {
  CheckpointKind kind = CheckpointKind::dcp;
  bool replaces = false;
  int fatal_rank = 0;
  int fatal_step = 0;  // 0: none
  int signal = SIGKILL;
};

std::string root;  // DIRECTORY

// A checkpoint of this kind whose elements are all `number`, with a file for each rank.
std::string source_of(CheckpointKind kind, int number) {
  return root + "/" + std::string(to_string(kind)) + std::to_string(number);
}

void make_source(CheckpointKind kind, int number) {
  std::vector<float> memory(60, static_cast<float>(number));
  auto storage = std::make_shared<Storage>();
  storage->data = reinterpret_cast<std::byte*>(memory.data());
  storage->size = memory.size() * sizeof(float);
  Value model = Value::dict();
  for (const char* name : {"a", "b", "c"}) {
    Tensor tensor;
    tensor.shape = {12, 5};
    tensor.pieces.push_back({Box{{0, 0}, {12, 5}}, storage, 0, {}, -1});
    model.set_item(name, Value(std::move(tensor)));
  }
  const std::string dcp = source_of(CheckpointKind::dcp, number);
  if (!fs::exists(dcp)) {
    SaveOptions options;
    options.one_file_an_item = true;
    save(Value::dict({{"model", model}}), dcp, options);
  }
  if (kind == CheckpointKind::dcp) return;
  std::ofstream(root + "/config.yaml") << "run: " << number << "\n";
  ConvertOptions options;
  options.to = kind;
  options.ranks = kRanks;
  options.olmo.config = root + "/config.yaml";
  (void)convert(dcp, source_of(kind, number), options);
}

std::set<std::string> files_in(const std::string& directory) {
  std::set<std::string> files;
  for (const auto& entry : fs::recursive_directory_iterator(directory)) {
    if (entry.is_regular_file()) files.insert(fs::relative(entry.path(), directory));
  }
  return files;
}

// The number that the checkpoint at the target holds, whole; 0: there is no marker, -1: it is not
// whole.
int number_at(const std::string& target) {
  if (!fs::exists(target + "/.metadata") && !fs::exists(target + "/config.yaml")) return 0;
  if (!verify(target).findings.empty()) return -1;
  const Value tree = Checkpoint::open(target).load();
  std::set<float> elements;
  for (const char* name : {"a", "b", "c"}) {
    const Storage& storage = *tree.at("model").at(name).as_tensor().pieces.at(0).storage;
    const auto* data = reinterpret_cast<const float*>(storage.data);
    elements.insert(data, data + 60);
  }
  return elements.size() == 1 ? static_cast<int>(*elements.begin()) : -1;
}

void take_steps(const Run& run) {
  testing::on_step() = [&run](const char* call, std::string_view name) {
    if (run.fatal_step == 0 || board->steps < run.fatal_step)
      std::snprintf(board->last_step, sizeof board->last_step, "%s %.*s", call,
                    static_cast<int>(std::min<std::size_t>(name.size(), 80)), name.data());
    if (++board->steps == run.fatal_step) ::kill(::getpid(), run.signal);
  };
}

int take_part(Group& group, const Run& run, const std::string& target, int rank) {
  std::shared_ptr<Store> store = posix_store(target);
  if (rank == run.fatal_rank) {
    store = std::make_shared<testing::SteppingStore>(store);
    take_steps(run);
  }
  try {
    upload(source_of(run.kind, 2), store, {.overwrite = run.replaces, .threads = 1}, group);
    board->said[rank] = Said::uploaded;
  } catch (const Error& error) {
    board->said[rank] = Said::failed;
    std::snprintf(board->error[rank], sizeof board->error[rank], "%s", error.what());
  }
  return 0;
}

// What is wrong with what the ranks say; empty: nothing.
std::string check_ranks(const Run& run, bool is_new) {
  std::string wrong;
  for (int rank = 0; rank < kRanks; ++rank) {
    const std::string who = " rank " + std::to_string(rank);
    if (run.signal == SIGKILL && run.fatal_step > 0 && rank == run.fatal_rank) continue;
    if (board->said[rank] == Said::nothing) wrong += who + " has said nothing;";
    if (board->said[rank] == Said::uploaded && !is_new) wrong += who + " says it is uploaded;";
    if (run.fatal_step == 0 && board->said[rank] != Said::uploaded)
      wrong += who + ": " + board->error[rank];
  }
  return wrong;
}

std::string check_outcome(const Run& run, const std::string& target) {
  const int number = number_at(target);
  if (number < 0 || (number == 1 && !run.replaces))
    return " the target holds " + std::to_string(number) + ";";
  std::string wrong = check_ranks(run, number == 2);
  (void)upload(source_of(run.kind, 2), target, {.overwrite = true});
  if (files_in(target) != files_in(source_of(run.kind, 2))) wrong += " it left something;";
  if (number_at(target) != 2) wrong += " the next upload is not whole;";
  return wrong;
}

std::string carry_out(const Run& run) {
  const std::string target = root + "/target";
  fs::remove_all(target);
  if (run.replaces) (void)upload(source_of(run.kind, 1), target);
  board = new (board) Board;
  const bool is_stopped = run.signal == SIGSTOP;
  auto children = testing::fork_group(
      kRanks, {.silence = is_stopped ? kSilenceOfStopped : kSilence}, kLimit,
      [&](Group& group, int rank) { return take_part(group, run, target, rank); });
  const std::string wrong =
      testing::end_with_fatal(children, run.fatal_rank, is_stopped, Clock::now() + kLimit);
  return wrong.empty() ? check_outcome(run, target) : wrong;
}

struct Count {
  int steps = 0;
  int wrong = 0;
};

void count(const Run& run, Count& all) {
  const std::string wrong = carry_out(run);
  ++all.steps;
  if (wrong.empty()) return;
  ++all.wrong;
  std::printf("%s: rank %d %s at step %d (%s), %s:%s\n", std::string(to_string(run.kind)).c_str(),
              run.fatal_rank, run.signal == SIGKILL ? "killed" : "stopped", run.fatal_step,
              board->last_step, run.replaces ? "replacing" : "new", wrong.c_str());
}

// Ends the rank at each of its steps; every `stride`th is enough where each takes long.
void count_all(Run run, int stride, Count& all) {
  count(run, all);  // nothing happens: how many steps there are
  const int steps = board->steps;
  if (steps == 0) ++all.wrong;
  for (run.fatal_step = 1; run.fatal_step <= steps; run.fatal_step += stride) count(run, all);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  root = argv[1];
  fs::remove_all(root);
  fs::create_directories(root);
  board = testing::shared_by_processes<Board>();
  const CheckpointKind kinds[] = {CheckpointKind::dcp, CheckpointKind::olmo_legacy};
  for (const CheckpointKind kind : kinds) {
    for (const int number : {1, 2}) make_source(kind, number);
  }
  Count killed, stopped;
  for (const CheckpointKind kind : kinds) {
    for (const bool replaces : {false, true}) {
      for (const int rank : {0, 2}) {
        count_all({.kind = kind, .replaces = replaces, .fatal_rank = rank}, 1, killed);
      }
    }
  }
  for (const int rank : {0, 2}) {
    count_all({CheckpointKind::olmo_legacy, true, rank, 0, SIGSTOP}, 2, stopped);
  }
  fs::remove_all(root);
  std::printf("killed at %d steps, stopped at %d; %d and %d wrong\n", killed.steps, stopped.steps,
              killed.wrong, stopped.wrong);
  return killed.wrong + stopped.wrong > 0 ? 1 : 0;
}
