#include "base/job_log.h"

#include <atomic>
#include <exception>
#include <utility>

namespace tessera {
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

}  // namespace tessera
