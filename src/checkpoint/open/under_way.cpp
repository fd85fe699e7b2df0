#include "checkpoint/open/under_way.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <filesystem>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/copies.h"
#include "base/host_process.h"
#include "base/log.h"
#include "base/parallel.h"
#include "base/process.h"
#include "base/text.h"
#include "checkpoint/open/located.h"
#include "comm/confer.h"
#include "comm/message.h"
#include "io/source.h"
#include "storage/posix/lock.h"
#include "storage/storage.h"
#include "tessera/storage.h"
#include "value/render.h"

namespace tessera {

namespace {

struct UnderWayEntry {
  std::uint64_t number = 0;
  MadeHere made_here = {};
  std::string place;
  std::shared_ptr<const Decision> decision;
};

// Is there until the process ends: threads may work on behind the end of main().
struct UnderWayTable {
  ShortMutex mutex;
  std::vector<UnderWayEntry> entries;  // guarded by mutex
  std::uint64_t last = 0;              // guarded by mutex
  std::atomic<std::size_t> size{0};    // of entries
};

UnderWayTable& under_way = *new UnderWayTable;

// The place as a text, without a slash at its end.
std::string key_of_place(const Location& where) {
  std::string text = where.store ? where.store->name() : where.path;
  const bool is_named = !where.name.empty();
  if (where.store && !is_remote(text) && !text.starts_with('/')) {
    // A store that is no directory, such as one in memory, is only itself.
    text =
        fmt::format("{} at {}://{}", text, static_cast<const void*>(where.store.get()), where.name);
  } else if (!is_remote(text)) {
    text = followed_path(is_named ? text + "/" + where.name : text);
  } else if (is_named) {
    text += "/" + where.name;
  }
  while (text.size() > 1 && text.ends_with('/')) text.pop_back();
  return text;
}

// Whether `inner` is `outer` or below it.
bool is_in(std::string_view inner, std::string_view outer) {
  if (!inner.starts_with(outer)) return false;
  return inner.size() == outer.size() || outer.ends_with('/') || inner[outer.size()] == '/';
}

std::shared_ptr<const Decision> first_under_way(const std::string& place, Looks looks) {
  const std::lock_guard lock(under_way.mutex);
  for (const UnderWayEntry& entry : under_way.entries) {
    if (!entry.made_here || entry.decision->is_made()) continue;
    const bool is_there = looks == Looks::at_run ? is_in(entry.place, place)  //
                                                 : is_in(place, entry.place);
    if (is_there) return entry.decision;
  }
  return nullptr;
}

}  // namespace

UnderWay::UnderWay(const Location& where, std::shared_ptr<const Decision> decision)
    : number_([&] {
        UnderWayEntry entry{.place = key_of_place(where), .decision = std::move(decision)};
        const std::lock_guard lock(under_way.mutex);
        entry.number = ++under_way.last;
        under_way.entries.push_back(std::move(entry));
        under_way.size = under_way.entries.size();
        return under_way.last;
      }()) {}

UnderWay::~UnderWay() {
  const std::lock_guard lock(under_way.mutex);
  std::erase_if(under_way.entries,
                [this](const UnderWayEntry& entry) { return entry.number == number_; });
  under_way.size = under_way.entries.size();
}

std::string meeting_name(const std::string& id, std::uint64_t number) {
  return std::string(kMeetingStart) + id + "-" + std::to_string(number);
}

bool is_meeting_name(std::string_view name) {
  if (!name.starts_with(kMeetingStart)) return false;
  name.remove_prefix(kMeetingStart.size());
  if (name.size() <= kAttemptDigits || !is_attempt(name.substr(0, kAttemptDigits))) return false;
  return name[kAttemptDigits] == '-' && plain_number(name.substr(kAttemptDigits + 1)).has_value();
}

bool is_meeting_object(std::string_view name) {
  constexpr std::array<const char*, 6> kObjectKinds{"here", "alive",     "up",
                                                    "down", "interrupt", "end"};
  return name == kMeetingBroken || name == kMeetingTrainer ||
         std::ranges::any_of(kObjectKinds, [name](std::string_view kind) {
           return name.starts_with(kind) && name.substr(kind.size()).starts_with('-');
         });
}

namespace {

// Whether a trainer of this host has the save there, and lives.
bool has_trainer(const std::string& meeting) {
  constexpr std::uint64_t kMostBytes = 4096;
  std::optional<bool> alive;
  (void)failure_of([&] {
    const auto source = posix_store(meeting)->open(kMeetingTrainer);
    alive =
        same_host::is_alive(same_host::process_from_text(to_text(read_all(*source, kMostBytes))));
  });
  return alive == true;
}

bool is_at_work(const std::string& meeting) {
  auto locked = Locked::unknown;  // also of what somebody else may not open
  (void)failure_of([&] { locked = is_free(meeting); });
  return locked == Locked::no && !has_trainer(meeting);
}

// The directories in which writer processes meet below the run that lost their trainers.
std::vector<std::string> meetings_under_way(const std::string& run, const std::string& but) {
  std::vector<std::string> found;
  std::error_code none;
  for (std::filesystem::directory_iterator at(run, none), end; !none && at != end;
       at.increment(none)) {
    const std::string name = at->path().filename().string();
    if (name != but && is_meeting_name(name) && is_at_work(at->path().string()))
      found.push_back(at->path().string());
  }
  return found;
}

// A trainer that starts again may find the writer of the one before at work.
void await_writer_processes(const std::string& run, const std::stop_token& stop,
                            const std::string& but) {
  constexpr std::chrono::milliseconds kBetweenLooks{20};
  constexpr std::chrono::seconds kMost{60};
  const auto end = std::chrono::steady_clock::now() + kMost;
  bool is_said = false;
  const auto look = [&] { return meetings_under_way(run, but); };
  for (auto left = look(); !left.empty(); left = look()) {
    if (!std::exchange(is_said, true)) {
      log(LogLevel::info,
          "waiting for the writer process that is at work beside " + printable(left.front()));
    }
    if (stop.stop_requested() || HeedStop::is_requested()) return;
    if (std::chrono::steady_clock::now() >= end) {
      log(LogLevel::warning, "a writer process is still at work beside " + printable(left.front()) +
                                 ": its checkpoint is not considered");
      return;
    }
    std::this_thread::sleep_for(kBetweenLooks);
  }
}

void await_own_saves(const Location& where, Looks looks, const std::stop_token& stop) {
  constexpr std::chrono::milliseconds kBetweenLooks{50};
  const std::string place = key_of_place(where);
  bool is_said = false;
  while (const auto decision = first_under_way(place, looks)) {
    if (!std::exchange(is_said, true))
      log(LogLevel::info, "waiting for the save that is under way at " + printable(place));
    while (!decision->wait_for(kBetweenLooks))
      if (stop.stop_requested() || HeedStop::is_requested()) return;
  }
}

}  // namespace

void await_saves(const Location& where, Looks looks, const std::stop_token& stop,
                 const std::string& but) {
  if (thread_job().behind != nullptr) return;
  if (under_way.size > 0) {
    await_copies();  // one of the saves may wait for this thread to come by
    await_own_saves(where, looks, stop);
  }
  if (looks != Looks::at_run) return;
  const bool is_store_of_disk = where.store && where.name.empty() && where.store->has_directories();
  if (is_on_disk(where) || is_store_of_disk) {
    await_writer_processes(is_store_of_disk ? where.store->name() : without_file_scheme(where.path),
                           stop, but);
  }
}

}  // namespace tessera
