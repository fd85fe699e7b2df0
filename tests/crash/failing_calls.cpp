// Calls of the system fail while two ranks save: every call, of either rank, for each kind of
// directory, in a new place and over a checkpoint.
//   failing_calls DIRECTORY MOST SEED [ROW [KIND]]
// MOST cases of each kind (0: all), of the row or of all rows, of that kind or of all. The rows are
// those of docs/fault-rows.md, and failing_rows.h says what each asks for. After every case
//   - both ranks have ended by themselves, soon, with one and the same error, or have both saved;
//   - the directory has the new checkpoint, whole, if the call that commits was made, and else what
//     it had before, also whole: and nothing else, unless the fault kept the ranks from cleaning
//     up;
//   - a second save, by another number of ranks, works and leaves nothing of the first (R10).
// Prints a line for each case that goes wrong and one for each row; exits with 1 when one did.
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "failing_rows.h"
#include "five_kinds.h"
#include "injected_calls.h"
#include "multirank/forked_ranks.h"
#include "socket_wire.h"

namespace {

using namespace tessera;
using testing::Clock;
using testing::Expect;
using testing::Injection;
using testing::Injector;
using testing::Row;
namespace fs = std::filesystem;

constexpr int kRanks = 2;
constexpr std::chrono::milliseconds kSilence{10'000}, kSilenceOfStopped{600};
constexpr std::chrono::seconds kLimit{20};

// State of this process, for the actions.
std::string target, parent, rival;

struct Case {
  const Row* row = nullptr;
  CheckpointKind kind = CheckpointKind::dcp;
  bool replaces = false;
  int victim = 0;
  int at = 0;  // 0: nothing happens
};

// What processes know of a run, in memory that they share.
struct Board {
  bool committed = false;
  bool deleted = false;  // by the action, and whether that was after the commit
  bool deleted_new = false;
  bool ended = false;  // the victim's process, before its time
  bool saved[kRanks] = {};
  bool asked[kRanks] = {};  // what committed() says where the outcome is not known
  char error[kRanks][1024] = {};
  Injector injector;  // of the victim; its functions are not to be used
};
Board* board = nullptr;

std::string describe(const Case& one) {
  return std::string(one.row->name) + " " + one.row->what + ", " +
         std::string(to_string(one.kind)) + (one.replaces ? " over another" : "") + ", rank " +
         std::to_string(one.victim) + " at " + std::to_string(one.at) + " (" +
         board->injector.last + ")";
}

// In one step: of a directory that goes file by file, a save that commits meanwhile can lose some.
void delete_all(const std::string& path) {
  std::error_code error;
  const std::string gone = parent + "-gone";
  fs::rename(path, gone, error);
  if (!error) fs::remove_all(gone, error);
}
void note_deletion() {
  board->deleted = true;
  board->deleted_new = board->committed;
}
}  // namespace

namespace tessera::testing {

void die() {
  ::raise(SIGKILL);
}
void stop() {
  ::raise(SIGSTOP);
}
void delete_target() {
  note_deletion();
  if (fs::exists(target + "/.metadata") || !fs::exists(target + "/config.yaml")) delete_all(target);
  std::error_code ignored;
  for (fs::directory_iterator entry(parent, ignored), end; entry != end; entry.increment(ignored))
    if (entry->path().filename().string().starts_with("step4-tmp-")) delete_all(entry->path());
}
void delete_parent() {
  note_deletion();
  delete_all(parent);
}
void bring_rival() {
  if (!fs::exists(rival + "/.metadata")) return fs::rename(rival, target);
  for (const auto& entry : fs::directory_iterator(rival))
    fs::rename(entry.path(), target + "/" + entry.path().filename().string());
}

}  // namespace tessera::testing

namespace {

std::set<std::string> files_below(const std::string& directory) {
  std::set<std::string> files;
  std::error_code none;
  for (fs::recursive_directory_iterator entry(directory, none), end; entry != end; ++entry)
    if (!entry->is_directory()) files.insert(entry->path().string());
  return files;
}

void save_alone(CheckpointKind kind, int number, const std::string& path) {
  save(testing::training_state(0, 1, number), path, testing::options_for_kind(kind, true));
}

Injector injector_for(const Case& one, const std::string& commit_path) {
  Injector injector;
  injector.injection = one.row->injection;
  injector.injection.at = one.at;
  if (one.row->is_sticky) injector.injection.times = testing::kForever;
  injector.commit_path = commit_path.c_str();
  return injector;
}

bool is_without_memory(const Case& one) {
  return one.row->injection.calls == testing::kAllocate;
}
bool is_stopped(const Case& one) {
  return one.row->injection.action == testing::stop;
}

int take_part(Group& group, const Case& one, int rank) {
  const SaveOptions options = testing::options_for_kind(one.kind, one.replaces);
  const Value tree = testing::training_state(rank, kRanks, 2);
  const std::string commit_path = one.kind == CheckpointKind::dcp ? target + "/.metadata" : target;
  Injector injector = injector_for(one, commit_path);
  if (rank != one.victim) injector.injection.calls = 0;
  injector.on_commit = [] { board->committed = true; };
  testing::arm(injector);
  try {
    save(tree, target, options, group);
    injector = testing::disarm();
    board->saved[rank] = true;
  } catch (const std::exception& error) {
    injector = testing::disarm();
    std::snprintf(board->error[rank], sizeof board->error[rank], "%s", error.what());
    const std::string text = error.what(), begin = "whether save ";
    const auto at = text.find(begin);
    if (at != std::string::npos)
      board->asked[rank] = committed(target, text.substr(at + begin.size(), 36));
  }
  if (rank != one.victim) return 0;
  injector.on_commit = nullptr;
  std::memcpy(board->injector.made, injector.made, sizeof injector.made);
  std::memcpy(board->injector.last, injector.last, sizeof injector.last);
  board->injector.hit = injector.hit;
  return 0;
}

// A rank without memory may be unable to tell the others why it ends: they name it. It may also
// find that out when all is done.
bool is_told_of(const Case& one) {
  const std::string victims = board->error[one.victim], others = board->error[1 - one.victim];
  if (!is_without_memory(one)) return false;
  if (victims.empty()) return board->committed && others.find("is complete") != std::string::npos;
  const bool is_both = victims.find("no memory") != std::string::npos &&
                       others.find("no memory") != std::string::npos;
  const bool is_named =
      is_both || others.find("rank " + std::to_string(one.victim)) != std::string::npos;
  return is_named || (others.empty() && board->committed);
}

// What the ranks say that lose another one.
std::string check_survivor(const Case& one) {
  const int other = 1 - one.victim;
  if (board->saved[other]) return board->committed ? "" : " it says that it is saved;";
  const std::string text = board->error[other];
  if (text.find("rank " + std::to_string(one.victim)) == std::string::npos)
    return " nobody is named: " + text;
  const bool knows_nothing = text.find("whether save") != std::string::npos;
  if (knows_nothing && is_stopped(one)) return "";
  if (knows_nothing)
    return board->asked[other] == board->committed ? "" : " committed() is wrong: " + text;
  const bool knows_it_is = text.find("is complete") != std::string::npos;
  return knows_it_is == board->committed ? "" : " that is not true: " + text;
}

// What is wrong with what ranks say; empty: nothing.
std::string check_words(const Case& one) {
  const std::string first = board->error[0], second = board->error[1];
  if (one.row->expect == Expect::others_fail || board->ended) return check_survivor(one);
  if (first != second && !is_told_of(one)) return " ranks say: " + first + " | " + second;
  const bool is_saved = board->saved[0];
  if (is_saved && !board->committed) return " ranks say that it is saved;";
  if (board->injector.hit == 0) return is_saved ? "" : " nothing happened: " + first;
  if (one.row->expect == Expect::success && !is_saved) return " it fails: " + first;
  if (one.row->expect == Expect::failure && is_saved) return " it is saved;";
  if (!is_saved && second.find(one.row->says) == std::string::npos) return " ranks say: " + first;
  return "";
}

// What is wrong with what lies there.
std::string check_files(const Case& one, const std::set<std::string>& before) {
  const int old = one.replaces ? 1 : 0;
  int expected = board->committed ? 2 : old;
  if (one.row->injection.action == testing::bring_rival && board->injector.hit > 0) expected = 9;
  int number = 0;
  try {
    number = testing::number_at(target);
  } catch (const std::exception& error) {
    return " " + std::string(error.what()) + ";";
  }
  const bool is_gone = board->deleted && number == 0 && (board->deleted_new || !board->saved[0]);
  if (number != expected && !is_gone) return " it holds " + std::to_string(number) + ";";
  if (board->committed || one.row->may_leave || board->ended || expected == 9) return "";
  const std::set<std::string> after = files_below(parent);
  return after == before ? "" : " it has left " + std::to_string(after.size()) + " files;";
}

// The next saves, by one rank, find their way and clear away what is left.
std::string check_next(const Case& one, std::size_t files) {
  try {
    save_alone(one.kind, 3, target);
    if (one.kind == CheckpointKind::dcp) save_alone(one.kind, 4, target);
    const int number = testing::number_at(target);
    if (number != (one.kind == CheckpointKind::dcp ? 4 : 3)) return " the next one is not there;";
  } catch (const std::exception& error) {
    return " the next save fails: " + std::string(error.what()) + ";";
  }
  const std::set<std::string> left = files_below(parent);
  return left.size() == files ? "" : " the next save leaves " + *left.rbegin() + " and others;";
}

// What is no checkpoint's lies beside the one that is replaced, and stays whatever happens.
bool has_notes(const Case& one) {
  return one.replaces && one.row->injection.action != testing::bring_rival;
}

std::string notes() {
  return target + "/notes/mine.txt";
}

std::string check_notes(const Case& one) {
  if (!has_notes(one) || board->deleted) return "";
  std::ifstream file(notes());
  std::string text;
  return std::getline(file, text) && text == "mine" ? "" : " the notes are gone;";
}

void prepare(const Case& one) {
  delete_all(parent);
  delete_all(rival);
  fs::create_directories(parent);
  if (one.replaces) save_alone(one.kind, 1, target);
  if (has_notes(one)) {
    fs::create_directories(fs::path(notes()).parent_path());
    std::ofstream(notes()) << "mine\n";
  }
  if (one.row->injection.action == testing::bring_rival) save_alone(one.kind, 9, rival);
  std::memset(static_cast<void*>(board), 0, sizeof *board);
}

std::string carry_out(const Case& one, std::size_t files) {
  prepare(one);
  const std::set<std::string> before = files_below(parent);
  const auto silence = is_stopped(one) ? kSilenceOfStopped : kSilence;
  auto children =
      testing::fork_group(kRanks, {.silence = silence}, kLimit,
                          [&](Group& group, int rank) { return take_part(group, one, rank); });
  const auto end = Clock::now() + kLimit;
  testing::wait_for(children, {.end = end, .without = is_stopped(one) ? one.victim : -1});
  std::string wrong;
  if (is_stopped(one)) {
    wrong = check_files(one, before);
    ::kill(children[static_cast<std::size_t>(one.victim)].process, SIGCONT);
    testing::wait_for(children, {.end = end});
    // It may have been behind its last look at the others.
    if (one.victim == 0 && board->committed) board->saved[1] = true;
  }
  wrong += testing::end_all(children, [&](int rank, int status) {
    if (status == 0) return true;
    if (rank != one.victim || !WIFSIGNALED(status)) return false;
    board->ended = true;
    return WTERMSIG(status) == SIGKILL && one.row->injection.action == testing::die;
  });
  if (wrong.empty()) wrong = check_words(one) + check_files(one, before) + check_notes(one);
  if (wrong.empty() && files > 0)
    wrong = check_next(one, files + (fs::exists(notes()) ? 1 : 0)) + check_notes(one);
  return wrong;
}

// The calls that a save makes: by what it is, then by which rank.
struct Counts {
  int made[2][testing::kCalls] = {};
  [[nodiscard]] int of(const Injection& injection) const {
    // The writes that another thread takes differ from run to run: all of them fail.
    if (injection.at_commit || injection.in_helpers) return 1;
    int count = 0;
    for (int bit = 0; bit < testing::kCalls; ++bit) {
      if ((injection.calls >> static_cast<unsigned>(bit) & 1U) == 0) continue;
      count += made[1][bit] + (injection.in_helpers ? 0 : made[0][bit]);
    }
    return count;
  }
};

const Row kNothing{"none", "nothing happens", {}, Expect::success};

Counts count_calls(Case one) {
  one.row = &kNothing;
  const std::string wrong = carry_out(one, 0);
  if (!wrong.empty()) std::printf("%s:%s\n", describe(one).c_str(), wrong.c_str());
  Counts counts;
  std::memcpy(counts.made, board->injector.made, sizeof counts.made);
  return counts;
}

std::size_t files_of(CheckpointKind kind) {
  delete_all(parent);
  save_alone(kind, 3, target);
  if (kind == CheckpointKind::dcp) save_alone(kind, 4, target);
  return files_below(parent).size();
}

struct Kind {
  CheckpointKind kind{};
  std::size_t files = 0;     // that one rank saves
  Counts counts[2][kRanks];  // by whether it replaces, and by rank
};

std::vector<Case> cases_of(const Row& row, const Kind& kind) {
  std::vector<Case> cases;
  for (const bool replaces : {false, true}) {
    if (replaces && !row.over_checkpoints) continue;
    for (int victim = 0; victim < (row.injection.at_commit ? 1 : kRanks); ++victim) {
      const int calls = kind.counts[replaces ? 1 : 0][victim].of(row.injection);
      for (int at = 1; at <= calls; ++at) cases.push_back({&row, kind.kind, replaces, victim, at});
    }
  }
  return cases;
}

struct Sum {
  int cases = 0, saved = 0, missed = 0, ended = 0, wrong = 0;
  double longest = 0;
};

void run(const Case& one, std::size_t files, Sum& sum) {
  const auto begin = Clock::now();
  const std::string wrong = carry_out(one, files);
  sum.longest = std::max(sum.longest, std::chrono::duration<double>(Clock::now() - begin).count());
  ++sum.cases;
  if (board->saved[1 - one.victim]) ++sum.saved;
  if (board->ended) ++sum.ended;
  if (board->injector.hit == 0 && !board->ended) ++sum.missed;
  if (wrong.empty()) return;
  ++sum.wrong;
  std::printf("%s:%s\n", describe(one).c_str(), wrong.c_str());
  std::fflush(stdout);
}

int run_row(const Row& row, const std::vector<Kind>& kinds, std::size_t most,
            std::mt19937& random) {
  Sum sum;
  for (const Kind& kind : kinds) {
    std::vector<Case> cases = cases_of(row, kind);
    std::shuffle(cases.begin(), cases.end(), random);
    const std::size_t wanted = row.injection.in_helpers ? cases.size() : most;
    if (most > 0 && cases.size() > wanted) cases.resize(wanted);
    for (const Case& one : cases) run(one, kind.files, sum);
  }
  std::printf("%s %s: %d cases, %d saved, %d wrong, the longest took %.1f s", row.name, row.what,
              sum.cases, sum.saved, sum.wrong, sum.longest);
  if (sum.ended > 0) std::printf(", %d ended the process", sum.ended);
  if (sum.missed > 0) std::printf(", in %d nothing happened", sum.missed);
  std::printf("\n");
  std::fflush(stdout);
  return sum.wrong;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) return 2;
  board = testing::shared_by_processes<Board>();
  parent = std::string(argv[1]) + "/run";
  rival = std::string(argv[1]) + "/rival";
  target = parent + "/step4";
  const auto most = static_cast<std::size_t>(std::atoi(argv[2]));
  std::mt19937 random(static_cast<unsigned>(std::atoi(argv[3])));
  std::vector<Kind> kinds;
  for (const CheckpointKind kind : testing::kFiveKinds) {
    if (argc > 5 && to_string(kind) != std::string_view(argv[5])) continue;
    Kind& one = kinds.emplace_back(Kind{kind, files_of(kind), {}});
    for (const bool replaces : {false, true})
      for (int victim = 0; victim < kRanks; ++victim)
        one.counts[replaces ? 1 : 0][victim] = count_calls({nullptr, kind, replaces, victim, 0});
  }
  int wrong = 0;
  for (const Row& row : testing::kRows)
    if (argc < 5 || std::strstr(row.name, argv[4]) != nullptr)
      wrong += run_row(row, kinds, most, random);
  fs::remove_all(argv[1]);
  return wrong > 0 ? 1 : 0;
}
