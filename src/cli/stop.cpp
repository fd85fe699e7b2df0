#include "cli/stop.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <cstdio>

#include "cli/output.h"

namespace tessera::cli {
namespace {

constexpr int kSignals[] = {SIGINT, SIGTERM, SIGHUP};

bool is_ignored(int signal) {
  struct sigaction action {};
  return ::sigaction(signal, nullptr, &action) == 0 && action.sa_handler == SIG_IGN;
}

const char* signal_name(int signal) {
  if (signal == SIGINT) return "SIGINT";
  return signal == SIGTERM ? "SIGTERM" : "SIGHUP";
}

sigset_t watched() {
  sigset_t set;
  sigemptyset(&set);
  for (const int signal : kSignals) {
    if (!is_ignored(signal)) sigaddset(&set, signal);
  }
  return set;
}

[[noreturn]] void die_of(int signal) {
  std::fflush(nullptr);
  ::signal(signal, SIG_DFL);
  ::raise(signal);  // at this thread: a signal at the process might be read by the watcher
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, signal);
  ::pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
  ::_exit(128 + signal);
}

}  // namespace

StopOnSignal::StopOnSignal() {
  const sigset_t set = watched();
  ::pthread_sigmask(SIG_BLOCK, &set, nullptr);
  signals_ = Fd(::signalfd(-1, &set, SFD_CLOEXEC));
  wake_ = Fd(::eventfd(0, EFD_CLOEXEC));
  watcher_ = std::thread([this] { watch(); });
}

StopOnSignal::~StopOnSignal() {
  const std::uint64_t one = 1;
  (void)!::write(wake_.get(), &one, sizeof one);
  watcher_.join();
}

void StopOnSignal::watch() {
  while (true) {
    pollfd fds[] = {{signals_.get(), POLLIN, 0}, {wake_.get(), POLLIN, 0}};
    if (::poll(fds, 2, -1) < 0) continue;
    if (fds[1].revents != 0) return;
    signalfd_siginfo info{};
    if (::read(signals_.get(), &info, sizeof info) != sizeof info) continue;
    if (signal_ != 0) die_of(static_cast<int>(info.ssi_signo));
    signal_ = static_cast<int>(info.ssi_signo);
    source_.request_stop();
  }
}

void StopOnSignal::end_by_signal(const std::string& left) const {
  if (signal_ == 0) return;
  complain(std::string("interrupted by ") + signal_name(signal_) + ": " + left);
  die_of(signal_);
}

}  // namespace tessera::cli
