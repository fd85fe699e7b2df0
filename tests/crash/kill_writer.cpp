// Trainers whose saves are processes of their own are killed, and so are these processes.
//   kill_writer COMMAND DIRECTORY RUNS SEED
// DIRECTORY may be a URL, in which only children of this process look.
// COMMAND is `tessera`. The ranks (1 to 4) are processes; each has a CheckpointWriter. They save
// step1 and wait for it, then stage step2, in half of the runs by copies behind the call
// (Overlap). When step2 is staged they change its tensors. RUNS in turns:
//   staged    all trainers are killed when all have staged: step2 is there, and latest_checkpoint()
//             of another process waits for it
//   staging   all trainers are killed at a random moment of the second save: step1 or step2 is the
//             latest, whole; step2 if all had staged
//   rank      one trainer is killed when all have staged: step2 is there, and the others hear of
//             both within the time that the group gives it
//   writer    one writer process is killed at a random moment: every trainer hears of it, and step1
//             or step2 is the latest, whole
//   frozen    one writer process is stopped then: the same
//   halted    one trainer is stopped when all have staged, for longer than a silence, while its
//             process writes; it hears of the save when it goes on
//   throwing  one rank has a tree that no save takes: all hear of it, and step1 is the latest
//   copying   all trainers are killed when save() has returned on all, and one has not copied all:
//             step1 is the latest
// Prints a line for each run that goes wrong and a summary; exits with 1 when one did.
#include <signal.h>
#include <sys/wait.h>

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
#include <utility>
#include <vector>

#include "comm/confer.h"
#include "five_kinds.h"
#include "multirank/forked_ranks.h"
#include "slow_memory.h"
#include "socket_wire.h"
#include "tessera/checkpoint_writer.h"
#include "tessera/error.h"
#include "tessera/io.h"
#include "tessera/leaf.h"
#include "tessera/run_directory.h"
#include "writer_processes.h"

namespace {

using namespace tessera;
using std::chrono::milliseconds;
using testing::Clock;

constexpr int kMostRanks = 4;
constexpr milliseconds kSilence{1000};
constexpr std::chrono::seconds kLimit{40};

enum class How { staged, staging, rank, writer, frozen, halted, throwing, copying };
constexpr const char* kNames[] = {"staged", "staging", "rank",     "writer",
                                  "frozen", "halted",  "throwing", "copying"};
constexpr int kWays = 8;

// What processes know of a run, in memory that they share.
struct Board {
  std::atomic<int> saved = 0;     // ranks that have step1
  std::atomic<int> begun = 0;     // that have called save() for step2
  std::atomic<int> returned = 0;  // for which it has returned
  std::atomic<int> staged = 0;    // that have copied all
  std::atomic<int> heard = 0;     // that have heard how it ended
  std::atomic<int> complete = 0;  // well
  std::atomic<pid_t> writers[kMostRanks] = {};
  char wrong[2000] = "";  // empty: nothing
};
Board* board = nullptr;

struct Run {
  std::string command, directory;
  How how = How::staged;
  int victim = 0;
  CheckpointKind kind = CheckpointKind::dcp;
  int ranks = 1;
  bool overlap = false;
};

testing::NamedShapes shapes() {
  return {{"a.w", {1537, 129}}, {"b.bias", {513}}};
}

// What is saved, and the memory that it lies in.
struct State {
  Value tree;
  std::vector<std::shared_ptr<Storage>> memory = {};

  explicit State(Value of) : tree(std::move(of)) {
    for (const auto& leaf : leaves_of(tree)) {
      if (!leaf.value.is(Value::Kind::tensor)) continue;
      for (const auto& piece : leaf.value.as_tensor().pieces) memory.push_back(piece.storage);
    }
  }
  void slow_down(milliseconds pause) {
    for (auto& piece : tree.at("model").at("a.w").as_tensor().pieces) {
      const auto bytes = std::exchange(piece.storage, std::make_shared<Storage>());
      piece.storage->source = std::make_shared<testing::SlowMemory>(bytes, pause);
      piece.storage->size = bytes->size;
    }
  }
  void change() {
    for (const auto& bytes : memory) std::memset(bytes->data, 0xFF, bytes->size);
  }
};

// Returns when all is copied, or never will be.
PendingSave stage(CheckpointWriter& writer, const Run& run, State& state, int rank) {
  const SaveOptions how = testing::options_for_kind(run.kind, false, shapes());
  const std::string place = run.directory + "/step2";
  SteadyMemory steady;
  if (run.overlap) {
    steady.has = [](const Storage& /*storage*/) { return true; };
    const bool is_held = run.how == How::copying && rank == run.victim;
    state.slow_down(is_held ? kLimit : milliseconds(3));
  }
  ++board->begun;
  PendingSave pending = writer.save(state.tree, place, how, {}, std::move(steady));
  ++board->returned;
  pending.await_staged();
  if (pending.staged()) ++board->staged;
  state.change();
  return pending;
}

int train(const Run& run, Group& group, int rank) {
  try {
    WriterOptions options;
    options.process = true;
    options.program = run.command;
    options.silence = kSilence;
    options.idle = false;
    if (run.how == How::halted) options.rate = 600'000;  // it takes seconds
    options.overlap = Overlap::always;
    options.end_within = milliseconds(10'000);
    const std::shared_ptr<Group> own(&group, [](Group*) {});
    CheckpointWriter writer(own, options);
    board->writers[rank] = testing::only_child();
    // A worker that was forked holds the connection to the process open.
    if (run.how == How::staged && rank % 2 == 0 && ::fork() == 0) {
      std::this_thread::sleep_for(3 * kSilence);
      ::_exit(0);
    }
    const auto tree = [&](int step) {
      return testing::training_state(rank, run.ranks, step, shapes());
    };
    const SaveOptions how = testing::options_for_kind(run.kind, false, shapes());
    writer.save(tree(1), run.directory + "/step1", how).result();
    ++board->saved;
    while (board->saved < run.ranks) std::this_thread::sleep_for(milliseconds(1));
    State second(tree(2));
    if (run.how == How::throwing && rank == run.victim)
      second.tree.at("model").at("a.w").as_tensor().pieces.at(0).storage->size = 1;
    const PendingSave pending = stage(writer, run, second, rank);
    const auto failure = failure_of([&] {
      pending.result();
      ++board->complete;
    });
    ++board->heard;
    if (failure && run.how == How::staged) throw Error(*failure);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
    return 1;
  }
}

void require(bool holds, const std::string& what) {
  if (!holds) throw Error(ErrorCode::incomplete, what);
}

// As a trainer finds it that starts again at once. In a store without locks nobody sees that a
// writer is still at work: there the trainer starts some seconds later.
std::optional<RunCheckpoint> newest_of(const Run& run) {
  const bool has_locks = run.directory.find("://") == std::string::npos;
  const auto end = Clock::now() + (has_locks ? 0 : 4) * kSilence;
  while (true) {
    const auto newest = latest_checkpoint(run.directory).found;
    if ((newest && newest->step == 2) || Clock::now() >= end) return newest;
    std::this_thread::sleep_for(milliseconds(50));
  }
}

void check_outcome(const Run& run) {
  const auto newest = newest_of(run);
  require(newest.has_value(), "there is no checkpoint");
  const auto step = newest->step;
  require(step == 2 || run.how != How::staged, "what all ranks had staged was not saved");
  const bool may_be_lost = run.how == How::writer || run.how == How::frozen;
  require(step == 2 || board->staged < run.ranks || may_be_lost,
          "what all ranks had staged was not saved");
  const bool one_has_none = run.how == How::throwing || run.how == How::copying;
  require(step == 1 || !one_has_none, "what one rank did not have was saved");
  const int dead = run.how == How::rank ? 1 : 0;
  const bool all_hear =
      run.how != How::staged && run.how != How::staging && run.how != How::copying;
  require(board->heard == run.ranks - dead || !all_hear, "a rank has not heard");
  require(step == 2 || board->complete == 0, "a rank was told that it is saved");
  require(testing::number_of(testing::verified_state(to_string(newest->where))) == step,
          "the newest step holds another one");
}

void await(const std::atomic<int>& counted, int count) {
  const auto end = Clock::now() + kLimit;
  while (counted < count && Clock::now() < end)
    std::this_thread::sleep_for(std::chrono::microseconds(200));
}

void kill_in(const Run& run, std::vector<testing::Child>& ranks, const testing::Below& below) {
  const auto victim = static_cast<std::size_t>(run.victim);
  if (run.how == How::throwing) return;
  if (run.how == How::staged || run.how == How::rank || run.how == How::halted) {
    await(board->staged, run.ranks);
  } else if (run.how == How::copying) {
    await(board->returned, run.ranks);
  } else {
    await(board->begun, 1);
    std::this_thread::sleep_for(std::chrono::microseconds(below(20'000)));
  }
  if (run.how == How::rank || run.how == How::halted) {
    ::kill(ranks[victim].process, run.how == How::rank ? SIGKILL : SIGSTOP);
    if (run.how == How::halted) std::this_thread::sleep_for(2 * kSilence);
  } else if (run.how == How::writer || run.how == How::frozen) {
    ::kill(board->writers[victim], run.how == How::writer ? SIGKILL : SIGSTOP);
  } else {
    for (const testing::Child& rank : ranks) ::kill(rank.process, SIGKILL);
  }
}

testing::Outcome carry_out(const Run& run, const testing::Below& below) {
  board = new (board) Board;
  auto ranks = testing::fork_group(run.ranks, {.silence = kSilence}, kLimit,
                                   [&](Group& group, int rank) { return train(run, group, rank); });
  await(board->saved, run.ranks);
  kill_in(run, ranks, below);
  const bool is_halted = run.how == How::halted;
  testing::wait_for(ranks, {.end = Clock::now() + kLimit, .without = is_halted ? run.victim : -1});
  if (is_halted) {
    ::kill(ranks[static_cast<std::size_t>(run.victim)].process, SIGCONT);
    testing::wait_for(ranks, {.end = Clock::now() + kLimit});
  }
  std::string wrong = testing::end_all(ranks, [](int, int status) {
    return status == 0 || (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
  });
  if (board->saved < run.ranks) wrong += " nothing was saved;";
  if (wrong.empty()) {
    wrong = testing::looked_at_apart(board->wrong, std::chrono::seconds(70),
                                     [&] { check_outcome(run); });
  }
  for (const std::atomic<pid_t>& writer : board->writers) {
    // It has no parent to wait for it; init does.
    const auto end = Clock::now() + kLimit;
    while (writer > 0 && ::kill(writer, 0) == 0 && Clock::now() < end)
      std::this_thread::sleep_for(milliseconds(5));
    if (writer > 0 && ::kill(writer, SIGKILL) == 0) wrong += " a writer process does not end;";
  }
  std::error_code none;
  std::filesystem::remove_all(run.directory, none);
  return {std::string(kNames[static_cast<int>(run.how)]) + ", " + std::string(to_string(run.kind)) +
              ", " + std::to_string(run.ranks) + " ranks" + (run.overlap ? ", overlap" : ""),
          wrong};
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  board = testing::shared_by_processes<Board>();
  int number = 0;
  const int wrong = testing::repeat(std::atoi(argv[3]), static_cast<unsigned>(std::atoi(argv[4])),
                                    [&](const testing::Below& below) {
                                      Run run;
                                      run.command = argv[1];
                                      run.directory =
                                          std::string(argv[2]) + "/run" + std::to_string(number);
                                      run.how = static_cast<How>(number % kWays);
                                      run.kind = testing::kFiveKinds[(number / kWays) % 5];
                                      run.ranks = 1 + below(kMostRanks);
                                      run.victim = below(run.ranks);
                                      run.overlap = below(2) == 0 || run.how == How::copying;
                                      ++number;
                                      return carry_out(run, below);
                                    });
  return wrong > 0 ? 1 : 0;
}
