#include "jobs.h"

#include <atomic>
#include <chrono>
#include <exception>
#include <memory>
#include <semaphore>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "tessera/library.h"

namespace tessera::python {
namespace {

constexpr std::chrono::milliseconds kLook{50};  // for signals

// What was heard and not said yet, the last first. Any thread hears, with or without the
// interpreter's lock, and a fork may come at any moment: so there is no mutex.
struct Heard {
  std::string text;
  Heard* before;
};
std::atomic<Heard*> heard{nullptr};

void hear(LogLevel level, std::string_view message) {
  if (level != LogLevel::warning) return;
  auto* const last = new Heard{std::string(message), heard.load()};
  while (!heard.compare_exchange_weak(last->before, last)) {
  }
}

// In the order in which they were heard. Returns false when one of them has raised.
bool say_heard() {
  std::vector<std::unique_ptr<Heard>> all;
  for (Heard* at = heard.exchange(nullptr); at != nullptr; at = all.back()->before)
    all.emplace_back(at);
  bool fine = true;
  for (auto one = all.rbegin(); one != all.rend() && fine; ++one)
    fine = PyErr_WarnEx(PyExc_UserWarning, (*one)->text.c_str(), 2) == 0;
  return fine;
}

}  // namespace

void hear_warnings() {
  set_log(hear);
}

void say_warnings(const std::exception_ptr& failure) {
  const bool fine = say_heard();
  // An interrupt is no warning that was made an error.
  if (failure && (fine || PyErr_ExceptionMatches(PyExc_Exception) != 0)) {
    PyErr_Clear();
    std::rethrow_exception(failure);
  }
  if (!fine) throw nb::python_error();
}

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
  say_warnings(failure);
}

void Job::note_error() noexcept {
  nb::python_error error;
  if (!raised_) raised_.emplace(std::move(error));
  source_.request_stop();
}

}  // namespace tessera::python
