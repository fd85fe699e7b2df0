#include "base/log.h"

#include <atomic>
#include <cstdio>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_set>
#include <utility>

#include "base/parallel.h"
#include "base/process.h"

namespace tessera {
namespace {

// A program that makes new texts for ever hears no new ones in the end.
constexpr std::size_t kMostTexts = 10'000;

struct Hook {
  ShortMutex mutex;
  std::shared_ptr<const LogHook> current;                 // guarded by mutex; null: the default
  std::unique_ptr<std::unordered_set<std::string>> said;  // by the default; guarded by mutex
};

constinit Hook hook;

bool is_first_rank() {
  const auto rank = environment_variable("RANK");
  return !rank || *rank == "0" || rank->empty();
}

// Not said before.
bool is_new(std::string_view message) {
  const std::lock_guard lock(hook.mutex);
  if (!hook.said) hook.said = std::make_unique<std::unordered_set<std::string>>();
  return hook.said->size() < kMostTexts && hook.said->emplace(message).second;
}

// One write, so that lines of several ranks stay whole.
void write(LogLevel level, std::string_view message) {
  const char* const kind = level == LogLevel::warning ? "warning" : "note";
  const auto line = std::string("tessera: ") + kind + ": " + std::string(message) + "\n";
  std::fwrite(line.data(), 1, line.size(), stderr);
}

// What the default writes.
bool is_written(LogLevel level, std::string_view message) {
  if (level == LogLevel::warning) return is_new(message);
  return level == LogLevel::info && environment_variable("TESSERA_LOG") == "info";
}

void say(LogLevel level, std::string_view message, bool is_of_all) {
  std::shared_ptr<const LogHook> listener;
  {
    const std::lock_guard lock(hook.mutex);
    listener = hook.current;
  }
  if (listener) return (*listener)(level, message);
  if (is_of_all && !is_first_rank()) return;
  if (is_written(level, message)) write(level, message);
}

}  // namespace

void set_log(LogHook given) {
  auto next = given ? std::make_shared<const LogHook>(std::move(given)) : nullptr;
  const std::lock_guard lock(hook.mutex);
  hook.current = std::move(next);
}

void log(LogLevel level, std::string_view message) {
  say(level, message, false);
}

void log_of_all(LogLevel level, std::string_view message) {
  say(level, message, true);
}

namespace {

std::uint64_t next_id() {
  static std::atomic<std::uint64_t> last{0};
  return ++last;
}

}  // namespace

JobLog::JobLog(EventHook hook, std::string_view job, int rank, std::string checkpoint)
    : hook_(std::move(hook)),
      job_(job),
      rank_(rank),
      checkpoint_(std::move(checkpoint)),
      id_(next_id()) {}

std::uint64_t JobLog::phase(std::string_view name,
                            const std::function<std::uint64_t()>& work) const {
  if (!hook_) return work();
  const auto begin = std::chrono::steady_clock::now();
  Event event{.job = job_, .phase = name, .rank = rank_, .checkpoint = checkpoint_, .id = id_};
  try {
    event.bytes = work();
  } catch (const Error& error) {
    event.error = &error;
    tell(event, begin);
    throw;
  } catch (const std::exception& other) {
    const Error error(ErrorCode::io, other.what());
    event.error = &error;
    tell(event, begin);
    throw;
  }
  tell(event, begin);
  return event.bytes;
}

void JobLog::tell(Event& event, std::chrono::steady_clock::time_point begin) const {
  const auto lasted = std::chrono::steady_clock::now() - begin;
  event.nanoseconds = static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(lasted).count());
  try {
    hook_(event);
  } catch (...) {  // NOLINT(bugprone-empty-catch): who only listens must not end a job of all ranks
  }
}

TrafficCount::TrafficCount() noexcept : outer_(std::exchange(thread_job().traffic, this)) {}

TrafficCount::~TrafficCount() {
  thread_job().traffic = outer_;
}

Traffic TrafficCount::total() const noexcept {
  return {requests_, retries_, bytes_again_};
}

void TrafficCount::add(const Traffic& traffic) noexcept {
  for (TrafficCount* count = thread_job().traffic; count != nullptr; count = count->outer_) {
    count->requests_ += traffic.requests;
    count->retries_ += traffic.retries;
    count->bytes_again_ += traffic.bytes_again;
  }
}

}  // namespace tessera
