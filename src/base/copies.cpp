#include "base/copies.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

#include "base/parallel.h"
#include "base/process.h"

namespace tessera {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// Of no other thread, also when this one has ended.
std::uint64_t thread_number() noexcept {
  static std::atomic<std::uint64_t> last = 0;
  thread_local const std::uint64_t number = ++last;
  return number;
}

}  // namespace

struct CopyState {
  MadeHere made_here = {};
  std::uint64_t caller = thread_number();
  Decision is_made = {};
  std::mutex mutex = {};
  std::function<void()> question = {};  // guarded by mutex; null: not yet, or it was taken
  std::uint64_t asker = 0;              // likewise: who has taken it
  Decision is_asked = {};
  std::atomic<milliseconds> most{milliseconds::max()};  // to wait for the caller
};

namespace {

struct WatchEntry {
  std::uint64_t number = 0;
  std::uint64_t thread = thread_number();
  MadeHere made_here = {};
  std::optional<Clock::time_point> before = {}, after = {};
  std::function<void()> ask = {};
  bool has_failed = false;
};
using Question = std::pair<std::uint64_t, std::function<void()>>;  // of the watch with the number

// Is there until the process ends: threads may work on behind the end of main().
struct CopyTable {
  ShortMutex mutex;  // guards the rest
  std::vector<std::shared_ptr<CopyState>> copies;
  std::vector<WatchEntry> watches;
  std::uint64_t last_watch = 0;
};

CopyTable& table = *new CopyTable;

struct LastStep {
  MadeHere made_here;
  Clock::time_point at;
};

thread_local std::optional<LastStep> last_step;

std::vector<std::shared_ptr<CopyState>> all_copies() {
  const std::lock_guard lock(table.mutex);
  return table.copies;
}

void forget(const std::shared_ptr<CopyState>& copy) {
  const std::lock_guard lock(table.mutex);
  std::erase(table.copies, copy);
}

// Whoever takes the question asks it, and others wait for that.
void ask(CopyState& copy) {
  std::function<void()> question;
  {
    const std::lock_guard lock(copy.mutex);
    if (copy.question) copy.asker = thread_number();
    question = std::exchange(copy.question, nullptr);
    const bool asks_already = copy.asker == thread_number();  // the question itself comes by
    if (!question && (copy.asker == 0 || asks_already)) return;
  }
  if (!question) return copy.is_asked.wait();
  question();
  copy.is_asked.make();
}

void pass(CopyState& copy) {
  if (!copy.made_here || thread_job().is_copying) return;
  copy.is_made.wait();
  if (copy.caller == thread_number()) ask(copy);
}

WatchEntry* watch_of(std::uint64_t number) {  // with the mutex held
  const auto found = std::ranges::find(table.watches, number, &WatchEntry::number);
  return found == table.watches.end() ? nullptr : &*found;
}

// Of all watches of this thread that have not heard of a step: each is asked once.
std::vector<Question> note_step(Clock::time_point now) {
  last_step = LastStep{.made_here = {}, .at = now};
  std::vector<Question> questions;
  const std::lock_guard lock(table.mutex);
  for (WatchEntry& watch : table.watches) {
    if (watch.thread != thread_number() || !watch.made_here) continue;
    if (!watch.after) watch.after = now;
    if (auto question = std::exchange(watch.ask, {}))
      questions.emplace_back(watch.number, std::move(question));
  }
  return questions;
}

}  // namespace

CopyUnderWay::CopyUnderWay() : state_(std::make_shared<CopyState>()) {
  const std::lock_guard lock(table.mutex);
  table.copies.push_back(state_);
}

CopyUnderWay::~CopyUnderWay() {
  end();
}

bool CopyUnderWay::ask_caller(std::function<void()> question, milliseconds within,
                              const std::stop_token& stop) {
  {
    const std::lock_guard lock(state_->mutex);
    state_->question = std::move(question);
  }
  state_->is_made.make();
  // In parts: of the time for which a process is stopped one counts at most.
  constexpr milliseconds kPart{50};
  const bool is_caller = state_->caller == thread_number();
  for (milliseconds waited{0}; !is_caller && waited < std::min(within, state_->most.load());
       waited += kPart) {
    if (state_->is_asked.wait_for(std::min(kPart, within))) return true;
    if (!stop.stop_requested()) continue;
    const std::lock_guard lock(state_->mutex);
    if (std::exchange(state_->question, nullptr)) return false;
  }
  ask(*state_);
  return true;
}

void CopyUnderWay::hurry(milliseconds within) {
  state_->most = within;
}

void CopyUnderWay::end() {
  forget(state_);
  state_->is_made.make();
}

void CopyUnderWay::pass() {
  tessera::pass(*state_);
}

bool CopyUnderWay::pass_within(milliseconds time) {
  if (!state_->made_here) return true;
  if (!state_->is_made.wait_for(time)) return false;
  pass();
  return true;
}

void await_copies() {
  for (const auto& copy : all_copies()) pass(*copy);
}

void begin_step() {
  await_copies();
  for (const auto& [number, question] : note_step(Clock::now())) {
    try {
      question();
    } catch (...) {
      const std::lock_guard lock(table.mutex);
      if (WatchEntry* const watch = watch_of(number)) watch->has_failed = true;
    }
  }
}

StepWatch::StepWatch(std::function<void()> question)
    : number_([&question] {
        const std::lock_guard lock(table.mutex);
        WatchEntry entry{.number = ++table.last_watch};
        if (last_step && last_step->made_here) entry.before = last_step->at;
        entry.ask = std::move(question);
        table.watches.push_back(std::move(entry));
        return table.last_watch;
      }()) {}

StepWatch::~StepWatch() {
  std::function<void()> unasked;  // goes when the mutex is free
  const std::lock_guard lock(table.mutex);
  unasked = std::exchange(watch_of(number_)->ask, {});
  std::erase_if(table.watches, [this](const WatchEntry& watch) { return watch.number == number_; });
}

std::optional<std::chrono::nanoseconds> StepWatch::between() const {
  const std::lock_guard lock(table.mutex);
  const WatchEntry& watch = *watch_of(number_);
  if (!watch.made_here || !watch.before || !watch.after) return std::nullopt;
  return *watch.after - *watch.before;
}

bool StepWatch::has_failed() const {
  const std::lock_guard lock(table.mutex);
  return watch_of(number_)->has_failed;
}

}  // namespace tessera
