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
    with_lock([&] {
      if (raised_) return;
      // Nothing in this call has to be undone if the interpreter ends in it.
      static_assert(sizeof(unsigned long long) == sizeof now.done);
      PyObject* const heard = PyObject_CallFunction(progress_.ptr(), "KK", now.done, now.total);
      if (heard == nullptr) note_error();
      Py_XDECREF(heard);
    });
  };
}

void Job::run(const std::function<void()>& work) {
  std::exception_ptr failure;
  std::binary_semaphore done(0);
  copy_environment();  // by whom it is changed has the interpreter's lock, too
  {
    std::optional<AtWork> at_work(std::in_place);
    Unlocked unlocked;
    std::thread worker([&] {
      try {
        work();
      } catch (...) {
        failure = std::current_exception();
      }
      at_work.reset();
      done.release();
    });
    while (!done.try_acquire_for(kLook)) {
      unlocked.interrupted_by([&] {
        if (PyErr_CheckSignals() != 0) note_error();
      });
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
