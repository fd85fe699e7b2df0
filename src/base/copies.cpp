#include "base/copies.h"

#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

#include "base/parallel.h"
#include "base/process.h"

namespace tessera {

struct CopyState {
  MadeHere made_here = {};
  Decision is_made = {};
  std::mutex mutex = {};
  std::function<void()> then = {};  // guarded by mutex
};

namespace {

using Clock = std::chrono::steady_clock;

struct WatchEntry {
  std::uint64_t number = 0;
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
  MadeHere stepped_here;  // of last_step
  std::optional<Clock::time_point> last_step;
};

CopyTable& table = *new CopyTable;

std::shared_ptr<CopyState> first_copy() {
  const std::lock_guard lock(table.mutex);
  const auto found =
      std::ranges::find_if(table.copies, [](const auto& copy) { return bool{copy->made_here}; });
  return found == table.copies.end() ? nullptr : *found;
}

void forget(const std::shared_ptr<CopyState>& copy) {
  const std::lock_guard lock(table.mutex);
  std::erase(table.copies, copy);
}

void pass(const std::shared_ptr<CopyState>& copy) {
  if (!copy->made_here) return;
  copy->is_made.wait();
  const std::lock_guard lock(copy->mutex);
  if (const auto then = std::exchange(copy->then, nullptr)) then();
  forget(copy);
}

WatchEntry* watch_of(std::uint64_t number) {  // with the mutex held
  const auto found = std::ranges::find(table.watches, number, &WatchEntry::number);
  return found == table.watches.end() ? nullptr : &*found;
}

// Of all watches that have not heard of a step: each is asked once.
std::vector<Question> note_step(Clock::time_point now) {
  std::vector<Question> questions;
  const std::lock_guard lock(table.mutex);
  for (WatchEntry& watch : table.watches) {
    if (!watch.after) watch.after = now;
    if (auto ask = std::exchange(watch.ask, {}); ask && watch.made_here)
      questions.emplace_back(watch.number, std::move(ask));
  }
  table.last_step = now;
  table.stepped_here = MadeHere();
  return questions;
}

}  // namespace

CopyUnderWay::CopyUnderWay() : state_(std::make_shared<CopyState>()) {
  const std::lock_guard lock(table.mutex);
  table.copies.push_back(state_);
}

CopyUnderWay::~CopyUnderWay() {
  forget(state_);
  state_->is_made.make();
}

void CopyUnderWay::end(std::function<void()> then) {
  if (!then) forget(state_);
  {
    const std::lock_guard lock(state_->mutex);
    state_->then = std::move(then);
  }
  state_->is_made.make();
}

void CopyUnderWay::pass() {
  tessera::pass(state_);
}

void CopyUnderWay::pass_within(std::chrono::milliseconds time) {
  if (state_->made_here && state_->is_made.wait_for(time)) pass();
}

void await_copies() {
  while (const auto copy = first_copy()) pass(copy);
}

void begin_step() {
  await_copies();
  for (const auto& [number, ask] : note_step(Clock::now())) {
    try {
      ask();
    } catch (...) {
      const std::lock_guard lock(table.mutex);
      if (WatchEntry* const watch = watch_of(number)) watch->has_failed = true;
    }
  }
}

StepWatch::StepWatch(std::function<void()> ask)
    : number_([&ask] {
        const std::lock_guard lock(table.mutex);
        WatchEntry entry{.number = ++table.last_watch};
        if (table.stepped_here) entry.before = table.last_step;
        entry.ask = std::move(ask);
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
