// Jobs that go on with one run at the same time: one of them has it.
//   lease_races RUN COUNT SEED
// RUN is a directory or the URL of a store. In each race two or three processes ask for the lease
// of the run. One has to get it, the others have to be `conflict`. Then, in turns, who has it
//   ends     and gives it back
//   dies     on this host, where that is seen at once
//   is lost  with its host: nobody can tell whether it lives, but it gives no sign
//   stops    on a host that is cut off: it goes on once another one has the run, and has to be told
//            that before it saves
// Prints a line for each that goes wrong and a summary; exits with 1 when one did.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "comm/confer.h"
#include "comm/message.h"
#include "io/source.h"
#include "multirank/forked_ranks.h"
#include "tessera/error.h"
#include "tessera/run_lease.h"
#include "tessera/storage.h"

namespace {

using namespace tessera;
using std::chrono::milliseconds;
using testing::Clock;

constexpr int kMostJobs = 3;
constexpr std::chrono::seconds kLimit{40};

enum class End { well, dies, lost, stops };
constexpr int kEnds = 4;
constexpr const char* kEndNames[] = {"ends", "dies", "is lost", "stops"};

enum class Answer { none, has_it, conflict, other };

// What is known of a race, in memory that processes share.
struct Board {
  std::atomic<int> ready = 0;
  std::atomic<Answer> answers[kMostJobs] = {};
  std::atomic<bool> may_end = false;
  std::atomic<bool> is_asked = false;  // the one that was stopped, whether it has the run
  std::atomic<Answer> late_answer = Answer::none;  // what it says
  char wrong[300] = "";
};

Answer answer_to(Board& board, const std::function<void()>& what) {
  const auto failure = failure_of(what);
  if (!failure) return Answer::has_it;
  if (failure->code() == ErrorCode::conflict) return Answer::conflict;
  std::snprintf(board.wrong, sizeof board.wrong, "%s", failure->what());
  return Answer::other;
}

int go_on_with(const std::string& run, int jobs, int job, Board& board) {
  ++board.ready;
  while (board.ready < jobs) std::this_thread::yield();
  std::optional<RunLease> lease;
  const Answer answer = answer_to(board, [&] {
    lease.emplace(run, LeaseOptions{.expires = std::chrono::seconds(1)});
    lease->require_held();
  });
  board.answers[job] = answer;
  if (answer != Answer::has_it) return 0;
  while (!board.may_end) {
    std::this_thread::sleep_for(milliseconds(1));
    if (board.is_asked && board.late_answer == Answer::none)
      board.late_answer = answer_to(board, [&] { lease->require_held(); });
  }
  return 0;
}

// The lease says of no process any more that this host could look at.
void move_to_another_host(const std::string& run) {
  const auto store = open_store(run);
  for (const ObjectInfo& object : store->list()) {
    if (!object.name.starts_with("tessera-lease-")) continue;
    std::string text = to_text(read_all(*store->open(object.name), 4096));
    const std::size_t begin = text.find("\nprocess ") + std::string("\nprocess ").size();
    text.erase(begin, text.find('\n', begin) - begin);
    put(*store, object.name, std::as_bytes(std::span(text)), IfExists::replace);
  }
}

class Races {
 public:
  explicit Races(std::string run) : run_(std::move(run)) {}
  ~Races() { end_stopped(); }
  Races(const Races&) = delete;
  Races& operator=(const Races&) = delete;

  testing::Outcome next(const testing::Below& below) {
    const int jobs = 2 + below(kMostJobs - 1);
    const auto end = static_cast<End>(number_++ % kEnds);
    auto* board = testing::shared_by_processes<Board>();
    auto children =
        testing::fork_ranks(jobs, [&](int job) { return go_on_with(run_, jobs, job, *board); });
    testing::Outcome outcome{"race " + std::to_string(number_) + " of " + std::to_string(jobs) +
                                 ", whose winner " + kEndNames[static_cast<int>(end)],
                             ""};
    const auto winner = decided(*board, jobs, outcome.wrong);
    if (winner) {
      outcome.wrong += wrong_of_stopped();
      end_as(end, *board, children, *winner);
    }
    testing::wait_for(children,
                      {.end = Clock::now() + (outcome.wrong.empty() ? kLimit : milliseconds(0)),
                       .without = stopped_ ? winner.value_or(-1) : -1});
    for (int job = 0; job < jobs; ++job)
      if (stopped_ && job == winner) children[static_cast<std::size_t>(job)].status = 0;
    outcome.wrong += testing::end_all(children, [&](int job, int status) {
      return status == 0 || (job == winner && end != End::well);
    });
    return outcome;
  }

 private:
  struct Stopped {
    pid_t process;
    Board* board;
  };

  // The one that has the run, if it is one and all others are `conflict`.
  static std::optional<int> decided(const Board& board, int jobs, std::string& wrong) {
    const auto end = Clock::now() + kLimit;
    int has_it = 0, unanswered = jobs;
    std::optional<int> winner;
    while (unanswered > 0 && Clock::now() < end) {
      std::this_thread::sleep_for(milliseconds(1));
      unanswered = has_it = 0;
      for (int job = 0; job < jobs; ++job) {
        const Answer answer = board.answers[job];
        if (answer == Answer::none) ++unanswered;
        if (answer == Answer::has_it) ++has_it, winner = job;
      }
    }
    if (unanswered > 0) wrong += " " + std::to_string(unanswered) + " never heard;";
    if (has_it != 1) wrong += " " + std::to_string(has_it) + " have the run;";
    if (board.wrong[0] != '\0') wrong += " " + std::string(board.wrong) + ";";
    return has_it == 1 ? winner : std::nullopt;
  }

  // Another one has the run now, which the one that was stopped has to be told.
  std::string wrong_of_stopped() {
    if (!stopped_) return "";
    Board& board = *stopped_->board;
    board.is_asked = true;
    ::kill(stopped_->process, SIGCONT);
    const auto end = Clock::now() + kLimit;
    while (board.late_answer == Answer::none && Clock::now() < end)
      std::this_thread::sleep_for(milliseconds(1));
    const bool is_told = board.late_answer == Answer::conflict;
    end_stopped();
    return is_told ? "" : " who was stopped was not told that the run is another one's;";
  }
  void end_stopped() {
    if (!stopped_) return;
    stopped_->board->may_end = true;
    ::kill(stopped_->process, SIGCONT);
    ::waitpid(stopped_->process, nullptr, 0);
    stopped_.reset();
  }

  void end_as(End end, Board& board, const std::vector<testing::Child>& jobs, int winner) {
    const pid_t process = jobs[static_cast<std::size_t>(winner)].process;
    if (end == End::well) board.may_end = true;
    if (end == End::dies || end == End::lost) ::kill(process, SIGKILL);
    if (end == End::stops) {
      ::kill(process, SIGSTOP);
      stopped_ = {process, &board};
    }
    if (end != End::lost && end != End::stops) return;
    siginfo_t ended{};
    ::waitid(P_PID, static_cast<id_t>(process), &ended, WEXITED | WSTOPPED | WNOWAIT);
    (void)testing::looked_at_apart(board.wrong, kLimit, [this] { move_to_another_host(run_); });
  }

  const std::string run_;
  int number_ = 0;
  std::optional<Stopped> stopped_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  Races races(argv[1]);
  const int wrong = testing::repeat(std::atoi(argv[2]), static_cast<unsigned>(std::atoi(argv[3])),
                                    [&](const testing::Below& below) { return races.next(below); });
  return wrong > 0 ? 1 : 0;
}
