#include "base/copies.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "base/parallel.h"
#include "base/process.h"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

struct CopyEntry {
  MadeHere made_here = {};
  std::shared_ptr<Decision> ended = {};
};
struct WatchEntry {
  std::uint64_t number = 0;
  MadeHere made_here = {};
  std::optional<Clock::time_point> before = {}, after = {};
};

// Is there until the process ends: threads may work on behind the end of main().
struct CopyTable {
  ShortMutex mutex;  // guards the rest
  std::vector<CopyEntry> copies;
  std::vector<WatchEntry> watches;
  std::uint64_t last_watch = 0;
  MadeHere stepped_here;  // of last_step
  std::optional<Clock::time_point> last_step;
};

CopyTable& table = *new CopyTable;

std::shared_ptr<Decision> first_copy() {
  const std::lock_guard lock(table.mutex);
  const auto found =
      std::ranges::find_if(table.copies, [](const auto& copy) { return bool{copy.made_here}; });
  return found == table.copies.end() ? nullptr : found->ended;
}

}  // namespace

CopyUnderWay::CopyUnderWay() : ended_(std::make_shared<Decision>()) {
  CopyEntry entry{.ended = ended_};
  const std::lock_guard lock(table.mutex);
  table.copies.push_back(std::move(entry));
}

CopyUnderWay::~CopyUnderWay() {
  {
    const std::lock_guard lock(table.mutex);
    std::erase_if(table.copies, [this](const CopyEntry& copy) { return copy.ended == ended_; });
  }
  ended_->make();
}

void await_copies() {
  while (const auto ended = first_copy()) ended->wait();
}

void begin_step() {
  await_copies();
  const auto now = Clock::now();
  const std::lock_guard lock(table.mutex);
  for (WatchEntry& watch : table.watches) {
    if (!watch.after) watch.after = now;
  }
  table.last_step = now;
  table.stepped_here = MadeHere();
}

StepWatch::StepWatch()
    : number_([] {
        const std::lock_guard lock(table.mutex);
        WatchEntry entry{.number = ++table.last_watch};
        if (table.stepped_here) entry.before = table.last_step;
        table.watches.push_back(entry);
        return table.last_watch;
      }()) {}

StepWatch::~StepWatch() {
  const std::lock_guard lock(table.mutex);
  std::erase_if(table.watches, [this](const WatchEntry& watch) { return watch.number == number_; });
}

std::optional<std::chrono::nanoseconds> StepWatch::between() const {
  const std::lock_guard lock(table.mutex);
  const auto found = std::ranges::find(table.watches, number_, &WatchEntry::number);
  if (!found->made_here || !found->before || !found->after) return std::nullopt;
  return *found->after - *found->before;
}

}  // namespace tessera
