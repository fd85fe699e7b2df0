#include "base/signals.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <ctime>
#include <mutex>
#include <string>

#include "tessera/error.h"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kSignals = 65;  // of Linux

struct Noted {
  std::atomic<std::int64_t> came{0};  // nanoseconds of steady_clock; 0: never
  std::atomic<pid_t> process{0};      // whose it is
  std::atomic<pid_t> inside{0};       // the thread that calls the handler before
  struct sigaction before {};         // does not change while the handler is there
  int users = 0;                      // guarded by the mutex
};

// Are there until the process ends: a handler may run at any time.
std::array<Noted, kSignals> noted;
ShortMutex& users_mutex = *new ShortMutex;

// Calls only what a handler may.
void note(int signal, siginfo_t* info, void* context) {
  const int error = errno;
  Noted& own = noted.at(static_cast<std::size_t>(signal));
  if (own.process != ::getpid()) {
    ::signal(signal, SIG_DFL);
    ::raise(signal);  // comes when the handler returns
    return;
  }
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  std::int64_t never = 0;
  own.came.compare_exchange_strong(never, std::int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec);
  // One that was installed behind ours may call ours in its turn.
  const auto thread = static_cast<pid_t>(::syscall(SYS_gettid));
  if (own.inside.exchange(thread) != thread) {
    if ((own.before.sa_flags & SA_SIGINFO) != 0) {
      own.before.sa_sigaction(signal, info, context);
    } else if (own.before.sa_handler != SIG_DFL && own.before.sa_handler != SIG_IGN) {
      own.before.sa_handler(signal);
    }
    own.inside = 0;
  }
  errno = error;
}

bool is_ours(const struct sigaction& action) {
  return (action.sa_flags & SA_SIGINFO) != 0 && action.sa_sigaction == &note;
}

}  // namespace

NotedSignal::NotedSignal(int signal) : signal_(signal) {
  const auto refuse = [signal] {
    throw Error(ErrorCode::invalid_argument,
                "signal " + std::to_string(signal) + " cannot be handled");
  };
  if (signal < 1 || signal >= kSignals) refuse();
  Noted& own = noted.at(static_cast<std::size_t>(signal));
  const std::lock_guard lock(users_mutex);
  if (own.process != ::getpid())
    own.users = 0;  // those that a child of fork() finds are its parent's
  struct sigaction before {};
  if (::sigaction(signal, nullptr, &before) != 0) refuse();
  if (!is_ours(before)) own.before = before;
  if (own.users == 0) own.came = 0;
  own.process = ::getpid();
  struct sigaction action {};
  action.sa_sigaction = &note;
  action.sa_flags = SA_SIGINFO | SA_RESTART;
  ::sigemptyset(&action.sa_mask);
  if (!is_ours(before) && ::sigaction(signal, &action, nullptr) != 0) refuse();
  ++own.users;
}

NotedSignal::~NotedSignal() {
  Noted& own = noted.at(static_cast<std::size_t>(signal_));
  const std::lock_guard lock(users_mutex);
  if (!made_here_ || --own.users > 0) return;
  struct sigaction now {};
  if (::sigaction(signal_, nullptr, &now) == 0 && is_ours(now))
    ::sigaction(signal_, &own.before, nullptr);
}

std::optional<Clock::time_point> NotedSignal::came() const noexcept {
  const std::int64_t at = noted.at(static_cast<std::size_t>(signal_)).came;
  if (at == 0) return std::nullopt;
  return Clock::time_point(std::chrono::nanoseconds(at));
}

}  // namespace tessera
