#include "errands.h"

#include <sys/types.h>
#include <unistd.h>

#include <condition_variable>
#include <exception>
#include <mutex>
#include <utility>

#include "ending.h"

namespace tessera::python {
namespace {

// The process in which this thread is on an errand. In a child that an errand has forked it is not.
thread_local pid_t on_errand_in = 0;

}  // namespace

struct Errands::State {
  std::mutex mutex;  // guards the rest
  std::condition_variable changed;
  const std::function<void()>* errand = nullptr;  // what is to be done
  std::exception_ptr failure;                     // of the last one
  bool is_over = false;

  void serve();
};

void Errands::State::serve() {
  on_errand_in = ::getpid();
  std::unique_lock lock(mutex);
  while (true) {
    changed.wait(lock, [this] { return errand != nullptr || is_over; });
    if (errand == nullptr) return;
    lock.unlock();
    std::exception_ptr thrown;
    try {
      with_lock(*errand);
    } catch (...) {
      thrown = std::current_exception();
    }
    lock.lock();
    failure = std::move(thrown);
    errand = nullptr;
    changed.notify_all();
  }
}

Errands::Errands()
    : state_(std::make_shared<State>()),
      thread_(std::make_unique<std::thread>([state = state_] { state->serve(); })),
      process_(::getpid()) {}

Errands::~Errands() {
  if (process_ != ::getpid()) {  // a child of fork() has no such thread
    static_cast<void>(thread_.release());
    return;
  }
  {
    const std::lock_guard lock(state_->mutex);
    state_->is_over = true;
    state_->changed.notify_all();
  }
  if (thread_->get_id() == std::this_thread::get_id()) {
    thread_->detach();
  } else {
    thread_->join();
  }
}

void Errands::run(const std::function<void()>& errand) {
  std::unique_lock lock(state_->mutex);
  state_->errand = &errand;
  state_->changed.notify_all();
  state_->changed.wait(lock, [this] { return state_->errand == nullptr; });
  if (const std::exception_ptr failure = std::exchange(state_->failure, nullptr))
    std::rethrow_exception(failure);
}

bool Errands::is_on() noexcept {
  return on_errand_in != 0 && on_errand_in == ::getpid();
}

}  // namespace tessera::python
