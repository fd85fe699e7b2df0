#include "jobs.h"

#include <chrono>
#include <exception>
#include <semaphore>
#include <thread>

#include "tessera/environment.h"

namespace tessera::python {
namespace {

constexpr std::chrono::milliseconds kLook{50};  // for signals

}  // namespace

ProgressHook Job::progress() {
  if (progress_.is_none()) return {};
  return [this](const Progress& now) {
    const nb::gil_scoped_acquire lock;
    if (raised_) return;
    try {
      progress_(now.done, now.total);
    } catch (nb::python_error& error) {
      raised_.emplace(std::move(error));
      source_.request_stop();
    }
  };
}

void Job::run(const std::function<void()>& work) {
  std::exception_ptr failure;
  std::binary_semaphore done(0);
  copy_environment();  // by whom it is changed has the interpreter's lock, too
  {
    const nb::gil_scoped_release unlocked;
    std::thread worker([&] {
      try {
        work();
      } catch (...) {
        failure = std::current_exception();
      }
      done.release();
    });
    while (!done.try_acquire_for(kLook)) {
      const nb::gil_scoped_acquire lock;
      if (PyErr_CheckSignals() != 0) note_error();
    }
    worker.join();
  }
  if (raised_) throw std::move(*raised_);
  if (failure) std::rethrow_exception(failure);
}

void Job::note_error() noexcept {
  nb::python_error error;
  if (!raised_) raised_.emplace(std::move(error));
  source_.request_stop();
}

}  // namespace tessera::python
