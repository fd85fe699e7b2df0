// Trainers whose writer processes keep their last snapshot die, and others start again.
//   restarts COMMAND DIRECTORY RUNS SEED [HOSTS]
// COMMAND is `tessera`. One run directory is trained on in RUNS lives of 1 to 4 ranks, each of
// another number than the one before. A life looks for the latest checkpoint, loads it, makes
// writers and saves one to three steps; it dies at the last of them, at a random moment while that
// is staged, while it is written, or after. In turns there die
//   trainers  all at once
//   rank      one trainer, and the others up to 0.3 s later
//   writer    the process of one rank, and all trainers up to 0.3 s later
//   both      all trainers and one process or all, one after the other or at once
// With HOSTS 2 ranks are on two hosts in turns, which are directories of notices here, and partners
// have copies. Then there are lives of 2 to 4 ranks, and there die, too
//   host      all trainers and processes of one host, and all others up to 0.3 s later
//   stopped   one process is stopped for up to 2 s, before all trainers and it are killed
// The next life has to find the newest step that all ranks had staged, on a disk or in memory (if
// processes have died, no older one than was decided); in memory if all processes live that have
// it, unless the same step is on the disk. All that it loads is compared by digests. Once it has
// saved, no process of an earlier life and no notice of one may be left. The last life ends well
// and leaves nothing at all. Prints a line for each life that goes wrong and a summary; exits with
// 1 when one did.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <span>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "base/digest.h"
#include "base/host_process.h"
#include "comm/confer.h"
#include "five_kinds.h"
#include "multirank/forked_ranks.h"
#include "slow_memory.h"
#include "socket_wire.h"
#include "tessera/checkpoint_writer.h"
#include "tessera/error.h"
#include "tessera/leaf.h"
#include "tessera/restore.h"
#include "tessera/run_directory.h"
#include "writer_processes.h"

namespace {

using namespace tessera;
using std::chrono::milliseconds;
using testing::Clock;
namespace fs = std::filesystem;

constexpr int kMostRanks = 4;
constexpr int kMostSaves = 3;
constexpr milliseconds kSilence{1000};
constexpr std::chrono::seconds kLimit{40};

enum class How { trainers, rank, writer, both, host, stopped, well };
constexpr const char* kHows[] = {"trainers", "rank", "writer", "both", "host", "stopped", "well"};
constexpr int kWays[] = {4, 6};  // to die, on one host and on two
enum class Moment { staging, writing, after };
constexpr const char* kMoments[] = {"staging", "writing", "after"};

// What is known of a life, in memory that processes share.
struct Board {
  std::atomic<int> begun[kMostSaves] = {};     // ranks that have called save()
  std::atomic<int> staged[kMostSaves] = {};    // for which it has returned
  std::atomic<int> complete[kMostSaves] = {};  // that have heard that it is saved
  std::atomic<int> first = -1;                 // the step that it started from; -1: none yet
  std::atomic<bool> from_memory = false;
  std::atomic<pid_t> writers[kMostRanks] = {};
  std::atomic<bool> is_wrong = false;
  char wrong[2000] = "";
};
Board* board = nullptr;

// Of what a life may find.
struct Expected {
  int least = 0, most = 0;
  bool in_memory = false;  // it has to be found there
};

struct Life {
  std::string command, run;
  std::vector<std::string> arenas = {};  // of each host
  How how = How::trainers;
  Moment moment = Moment::after;
  int ranks = 1;
  int victim = 0;
  int saves = 1;
  std::uint64_t rate = 0;
  Expected expected = {};
};

void require(bool holds, const std::string& what) {
  if (!holds) throw Error(ErrorCode::incomplete, what);
}

// Of no element the same as of another one, of another tensor or of another step.
float element(std::uint64_t salt, int step, std::int64_t at) {
  std::uint64_t mixed = salt + 0x9E3779B97F4A7C15U * static_cast<std::uint64_t>(step + 1);
  mixed += 0xBF58476D1CE4E5B9U * static_cast<std::uint64_t>(at + 1);
  mixed = (mixed ^ (mixed >> 29U)) * 0x94D049BB133111EBU;
  return static_cast<float>(mixed >> 40U);
}

void fill(const Piece& piece, const Shape& shape, std::uint64_t salt, int step) {
  const auto& box = std::get<Box>(piece.slice);
  auto* const elements = reinterpret_cast<float*>(piece.storage->data);
  for (std::int64_t i = 0; i < numel(piece.slice); ++i) {
    std::int64_t rest = i, at = 0, stride = 1;
    for (std::size_t d = shape.size(); d-- > 0;) {
      at += (box.offsets[d] + rest % box.sizes[d]) * stride;
      rest /= box.sizes[d];
      stride *= shape[d];
    }
    elements[i] = element(salt, step, at);
  }
}

template <typename Visit>
void for_tensors(const Value& tree, const Visit& visit) {
  for (const Leaf& leaf : leaves_of(tree))
    if (leaf.value.is(Value::Kind::tensor)) visit(leaf.name, leaf.value.as_tensor());
}

// What a rank has after a step.
Value state_of(int rank, int ranks, int step) {
  Value tree = testing::training_state(rank, ranks, step,
                                       {{"a.w", {509, 129}}, {"b.bias", {513}}, {"c.w", {67, 31}}});
  for_tensors(tree, [&](const std::string& name, const Tensor& tensor) {
    const std::uint64_t salt = digest64(std::as_bytes(std::span(name)));
    for (const Piece& piece : tensor.pieces) fill(piece, tensor.shape, salt, step);
  });
  return tree;
}

std::uint64_t digest_of(const Value& tree) {
  RunningDigest digest;
  for_tensors(tree, [&](const std::string& name, const Tensor& tensor) {
    digest.add(std::as_bytes(std::span(name)));
    for (const Piece& piece : tensor.pieces)
      digest.add({piece.storage->data, static_cast<std::size_t>(piece.storage->size)});
  });
  return digest.value();
}

// Each part of it takes as long to copy as it takes to be killed.
void slow_down(Value& tree) {
  for (const char* name : {"a.w", "b.bias", "c.w"}) {
    for (Piece& piece : tree.at("model").at(name).as_tensor().pieces) {
      const auto bytes = std::exchange(piece.storage, std::make_shared<Storage>());
      piece.storage->source = std::make_shared<testing::SlowMemory>(bytes, milliseconds(3));
      piece.storage->size = bytes->size;
    }
  }
}

// The step that this life goes on from; 0: there is none.
int start(const Life& life, Group& group) {
  const auto newest = latest_checkpoint(life.run, {}, group).found;
  const int step = newest ? static_cast<int>(newest->step) : 0;
  const Expected& expected = life.expected;
  require(step >= expected.least && step <= expected.most,
          "step " + std::to_string(step) + " was found, expected " +
              std::to_string(expected.least) + " to " + std::to_string(expected.most));
  if (!newest) return 0;
  const std::string where = to_string(newest->where);
  const bool is_in_memory = where.starts_with("arena://");
  // A process that has just committed may not have said yet that it is the same save.
  require(is_in_memory || !expected.in_memory || testing::is_checkpoint_at(where),
          "not in memory, but " + where);
  Value state = state_of(group.rank(), group.size(), 0);
  load(state, newest->where, group);
  require(testing::number_of(state) == step &&
              digest_of(state) == digest_of(state_of(group.rank(), group.size(), step)),
          "what was loaded from " + where + " is not what was saved");
  board->from_memory = is_in_memory;
  return step;
}

// The process that has written a notice, as src/storage/arena has it.
pid_t process_of_notice(const fs::path& notice) {
  std::ifstream text(notice);
  std::string line;
  for (int i = 0; i < 6; ++i) std::getline(text, line);
  return text ? same_host::process_from_text(line).pid : 0;  // 0: it is gone, or half written
}

// What is left of earlier lives. Empty: nothing.
std::string left_of_earlier(const Life& life) {
  const auto is_own = [](pid_t process) {
    return std::ranges::any_of(board->writers, [&](const auto& own) { return own == process; });
  };
  for (const std::string& arenas : life.arenas) {
    for (const pid_t process : testing::writers_with_arenas_in(arenas))
      if (!is_own(process)) return "the process " + std::to_string(process);
    std::error_code none;
    for (const auto& notice : fs::directory_iterator(arenas, none)) {
      const pid_t process = process_of_notice(notice.path());
      if (process != 0 && !is_own(process)) return "the notice " + notice.path().string();
    }
  }
  return "";
}

void require_nothing_left(const Life& life) {
  const auto end = Clock::now() + std::chrono::seconds(10);
  std::string left = left_of_earlier(life);
  while (!left.empty() && Clock::now() < end) {
    std::this_thread::sleep_for(milliseconds(5));
    left = left_of_earlier(life);
  }
  require(left.empty(), left + " of an earlier life is left");
}

// False: this life is about to end.
bool save_one(const Life& life, CheckpointWriter& writer, int number, int rank) {
  const int step = board->first + 1 + number;
  Value tree = state_of(rank, life.ranks, step);
  const bool is_last = number + 1 == life.saves;
  std::vector<std::shared_ptr<Storage>> memory;
  for_tensors(tree, [&](const std::string& /*name*/, const Tensor& tensor) {
    for (const Piece& piece : tensor.pieces) memory.push_back(piece.storage);
  });
  if (is_last && life.moment == Moment::staging) slow_down(tree);
  ++board->begun[number];
  SaveOptions options;
  options.overwrite = true;
  const PendingSave pending = writer.save(tree, life.run + "/step" + std::to_string(step), options);
  if (pending.staged()) ++board->staged[number];
  for (const auto& bytes : memory) std::memset(bytes->data, 0xFF, bytes->size);
  const auto failure = failure_of([&] { pending.result(); });
  if (!failure) ++board->complete[number];
  if (failure && (!is_last || life.how == How::well)) throw Error(*failure);
  return !failure;
}

std::size_t host_of(const Life& life, int rank) {
  return static_cast<std::size_t>(rank) % life.arenas.size();
}

int train(const Life& life, Group& group, int rank) {
  try {
    ::setenv("TESSERA_ARENA_DIR", life.arenas[host_of(life, rank)].c_str(), 1);
    const int first = start(life, group);
    board->first = first;
    WriterOptions options;
    options.process = true;
    options.program = life.command;
    options.silence = kSilence;
    options.keep = std::chrono::seconds(120);
    options.idle = false;
    options.rate = life.rate;
    options.partner = life.arenas.size() > 1 ? 1 : 0;
    const std::shared_ptr<Group> own(&group, [](Group*) {});
    CheckpointWriter writer(own, options);
    board->writers[rank] = testing::only_child();
    for (int number = 0; number < life.saves; ++number) {
      if (!save_one(life, writer, number, rank)) break;
      while (board->complete[number] < life.ranks) std::this_thread::sleep_for(milliseconds(1));
      if (number == 0) require_nothing_left(life);
    }
    while (life.how != How::well) ::pause();
    return 0;
  } catch (const std::exception& error) {
    if (!board->is_wrong.exchange(true))
      std::strncpy(board->wrong, error.what(), sizeof board->wrong - 1);
    return 1;
  }
}

void await(const std::atomic<int>& counted, int count) {
  const auto end = Clock::now() + kLimit;
  while (counted < count && !board->is_wrong && Clock::now() < end)
    std::this_thread::sleep_for(std::chrono::microseconds(200));
}

void sleep_below(const testing::Below& below, milliseconds most) {
  const auto microseconds = below(static_cast<int>(1000 * most.count()));
  std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
}

void kill_in(const Life& life, const std::vector<testing::Child>& ranks,
             const testing::Below& below) {
  const int last = life.saves - 1;
  if (life.moment == Moment::staging) {
    await(board->begun[last], 1 + below(life.ranks));
    sleep_below(below, milliseconds(15));
  } else if (life.moment == Moment::writing) {
    await(board->staged[last], life.ranks);
    sleep_below(below, milliseconds(life.rate > 0 ? 120 : 30));
  } else {
    await(board->complete[last], life.ranks);
    sleep_below(below, milliseconds(20));
  }
  const auto kill_trainers = [&] {
    for (const testing::Child& rank : ranks) ::kill(rank.process, SIGKILL);
  };
  const auto kill_writers = [&](bool all) {
    for (int rank = 0; rank < life.ranks; ++rank)
      if ((all || rank == life.victim) && board->writers[rank] > 0)
        ::kill(board->writers[rank], SIGKILL);
  };
  const bool is_trainer_first = below(2) == 0;
  if (life.how == How::rank) {
    ::kill(ranks[static_cast<std::size_t>(life.victim)].process, SIGKILL);
    sleep_below(below, milliseconds(300));
  } else if (life.how == How::writer) {
    kill_writers(false);
    sleep_below(below, milliseconds(300));
  } else if (life.how == How::host) {
    for (int rank = 0; rank < life.ranks; ++rank) {
      if (host_of(life, rank) != host_of(life, life.victim)) continue;
      ::kill(ranks[static_cast<std::size_t>(rank)].process, SIGKILL);
      if (board->writers[rank] > 0) ::kill(board->writers[rank], SIGKILL);
    }
    sleep_below(below, milliseconds(300));
  } else if (life.how == How::stopped) {
    const pid_t writer = board->writers[life.victim];
    if (writer > 0) ::kill(writer, SIGSTOP);
    sleep_below(below, milliseconds(2000));
    kill_trainers();
    kill_writers(false);
  } else if (life.how == How::both) {
    const bool all = below(2) == 0;
    if (is_trainer_first) kill_trainers();
    if (below(2) == 0) sleep_below(below, milliseconds(20));
    kill_writers(all);
  }
  kill_trainers();
}

// What a life has to find behind this one.
Expected left_by(const Life& life) {
  const int first = board->first, last = life.saves - 1;
  const bool has_lost_writers = life.how != How::trainers && life.how != How::rank;
  Expected next{first, first, life.expected.in_memory && !has_lost_writers};
  for (int number = 0; number < life.saves; ++number) {
    const int step = first + 1 + number;
    if (board->begun[number] == life.ranks) next.most = step;
    const bool is_staged = board->staged[number] == life.ranks && !has_lost_writers;
    if (is_staged || board->complete[number] > 0) next.least = step;
  }
  // A snapshot of this life is torn once the next save is staged; one of an earlier life stays.
  if (board->begun[last] > 0 && (last > 0 || next.most > first))
    next.in_memory = board->staged[last] == life.ranks && !has_lost_writers;
  return next;
}

std::string live(const Life& life, const testing::Below& below) {
  board = new (board) Board;
  auto ranks =
      testing::fork_group(life.ranks, {.silence = kSilence}, kLimit,
                          [&](Group& group, int rank) { return train(life, group, rank); });
  const bool ends_well = life.how == How::well;
  if (!ends_well) kill_in(life, ranks, below);
  testing::wait_for(ranks, {.end = Clock::now() + kLimit});
  std::string wrong = testing::end_all(ranks, [&](int, int status) {
    return ends_well ? status == 0 : WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
  });
  if (board->is_wrong) wrong = " " + std::string(board->wrong) + ";" + wrong;
  return wrong;
}

// So that the disk has a few steps only.
void remove_old(const Life& life, int newest) {
  for (const auto& entry : fs::directory_iterator(life.run)) {
    const std::string name = entry.path().filename();
    std::error_code none;
    if (name.starts_with("step") && std::atoi(name.c_str() + 4) + 2 < newest)
      fs::remove_all(entry.path(), none);
  }
}

std::string name_of(const Life& life, int before) {
  return std::string(kHows[static_cast<int>(life.how)]) + ", " +
         kMoments[static_cast<int>(life.moment)] + " save " + std::to_string(life.saves) + ", " +
         std::to_string(before) + " to " + std::to_string(life.ranks) + " ranks" +
         (life.rate > 0 ? ", slowly" : "");
}

// The lives of one run, one after the other.
class Lives {
 public:
  Lives(const std::string& command, const std::string& directory, int hosts)
      : command_(command), run_(directory + "/run") {
    fs::remove_all(directory);
    fs::create_directories(run_);
    for (int host = 0; host < hosts; ++host)
      arenas_.push_back(directory + "/arenas" + std::to_string(host));
    ::setenv("TESSERA_ARENA_IFNAME", "lo", 1);
  }

  testing::Outcome next(const testing::Below& below) {
    Life life = drawn(below);
    const int ways = kWays[arenas_.size() - 1];
    life.how = static_cast<How>(number_ % ways);
    life.moment = static_cast<Moment>(number_ / ways % 3);
    ++number_;
    return lived(life, below);
  }

  // Wrong ones.
  int finish() {
    const testing::Below none = [](int) { return 0; };
    Life life = drawn(none);
    life.how = How::well;
    testing::Outcome outcome = lived(life, none);
    std::fill(std::begin(board->writers), std::end(board->writers), 0);
    if (outcome.wrong.empty() && failure_of([&] { require_nothing_left(life); }))
      outcome.wrong = " " + left_of_earlier(life) + " is left in the end";
    if (!outcome.wrong.empty()) std::printf("%s:%s\n", outcome.run.c_str(), outcome.wrong.c_str());
    std::printf(
        "%d started from memory (%d behind a host that was lost), %d from a disk; %d had ended "
        "while they staged, %d while they "
        "wrote\n",
        from_memory_, behind_lost_host_, from_disk_, ended_staging_, ended_writing_);
    for (const std::string& arenas : arenas_)
      for (const pid_t process : testing::writers_with_arenas_in(arenas)) ::kill(process, SIGKILL);
    fs::remove_all(fs::path(run_).parent_path());
    return outcome.wrong.empty() ? 0 : 1;
  }

 private:
  Life drawn(const testing::Below& below) {
    Life life{.command = command_, .run = run_, .arenas = arenas_, .expected = expected_};
    const int least = static_cast<int>(arenas_.size());
    life.ranks = least + below(kMostRanks - least);
    if (life.ranks >= ranks_) ++life.ranks;  // another number than before
    life.victim = below(life.ranks);
    life.saves = 1 + below(kMostSaves);
    life.rate = below(2) == 0 ? 4'000'000 : 0;
    return life;
  }

  testing::Outcome lived(const Life& life, const testing::Below& below) {
    testing::Outcome outcome{name_of(life, ranks_), live(life, below)};
    ranks_ = life.ranks;
    if (board->first > 0) ++(board->from_memory ? from_memory_ : from_disk_);
    if (board->first > 0 && board->from_memory && before_ == How::host) ++behind_lost_host_;
    before_ = life.how;
    const int last = life.saves - 1;
    if (board->begun[last] > 0 && board->staged[last] < life.ranks) ++ended_staging_;
    if (board->staged[last] == life.ranks && board->complete[last] == 0) ++ended_writing_;
    // Behind one that went wrong anything may come.
    expected_ = outcome.wrong.empty() ? left_by(life) : Expected{0, INT_MAX, false};
    remove_old(life, expected_.least);
    return outcome;
  }

  const std::string command_, run_;
  std::vector<std::string> arenas_;  // of each host
  int number_ = 0, ranks_ = kMostRanks;
  int from_memory_ = 0, from_disk_ = 0, behind_lost_host_ = 0;
  How before_ = How::well;
  int ended_staging_ = 0, ended_writing_ = 0;
  Expected expected_;
};

}  // namespace

int main(int argc, char** argv) {
  const int hosts = argc == 6 ? std::atoi(argv[5]) : 1;
  if (argc < 5 || argc > 6 || hosts < 1 || hosts > 2) return 2;
  board = testing::shared_by_processes<Board>();
  Lives lives(argv[1], argv[2], hosts);
  const int wrong = testing::repeat(std::atoi(argv[3]), static_cast<unsigned>(std::atoi(argv[4])),
                                    [&](const testing::Below& below) { return lives.next(below); });
  return wrong + lives.finish() > 0 ? 1 : 0;
}
