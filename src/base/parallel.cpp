#include "base/parallel.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "tessera/error.h"

namespace tessera {

ThreadJob& thread_job() noexcept {
  static thread_local ThreadJob job;
  return job;
}

void require_threads(int threads) {
  if (threads >= 1 && threads <= kMostThreads) return;
  throw Error(ErrorCode::invalid_argument,
              std::to_string(threads) + " threads, expected 1 to " + std::to_string(kMostThreads));
}

void parallel_for(int threads, std::size_t count, const std::function<void(std::size_t)>& work) {
  std::atomic<std::size_t> next{0};
  std::atomic<bool> failed{false};
  std::mutex mutex;
  std::exception_ptr failure;     // guarded by mutex
  std::size_t failed_at = count;  // guarded by mutex
  const auto run = [&] {
    while (!failed.load(std::memory_order_relaxed)) {
      const std::size_t index = next.fetch_add(1);
      if (index >= count) return;
      try {
        work(index);
      } catch (...) {
        failed = true;
        const std::lock_guard lock(mutex);
        if (index < failed_at) {
          failed_at = index;
          failure = std::current_exception();
        }
      }
    }
  };
  const auto wanted =
      std::min<std::size_t>(threads > 1 ? static_cast<std::size_t>(threads) : 1, count);
  std::vector<std::jthread> workers;
  try {
    const ThreadJob job = thread_job();
    for (std::size_t i = 1; i < wanted; ++i) {
      workers.emplace_back([&run, job] {
        thread_job() = job;
        run();
      });
    }
  } catch (const std::system_error&) {
    // The system gives no more threads: those that are there do all of the work.
  }
  run();
  workers.clear();
  if (failure) std::rethrow_exception(failure);
}

HeedStop::HeedStop(std::stop_token stop) noexcept
    : stop_(std::move(stop)), outer_(std::exchange(thread_job().stop, this)) {}

HeedStop::~HeedStop() {
  thread_job().stop = outer_;
}

bool HeedStop::is_requested() noexcept {
  for (const HeedStop* one = thread_job().stop; one != nullptr; one = one->outer_)
    if (one->stop_.stop_requested()) return true;
  return false;
}

Settling::Settling() noexcept : before_(std::exchange(thread_job().is_settling, true)) {}

Settling::~Settling() {
  thread_job().is_settling = before_;
}

bool Settling::is_under_way() noexcept {
  return thread_job().is_settling;
}

void Decision::make() {
  const std::lock_guard lock(mutex_);
  is_made_ = true;
  changed_.notify_all();
}

void Decision::wait() const {
  std::unique_lock lock(mutex_);
  wait_for_change(changed_, lock, [this] { return is_made(); });
}

bool Decision::wait_for(std::chrono::milliseconds time) const {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, time, [this] { return is_made(); });
}

}  // namespace tessera
