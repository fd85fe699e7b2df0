// The interpreter's lock, and the end of the interpreter. Python ends a thread that asks for the
// lock from then on by pthread_exit(), and neither a job nor nanobind survives the unwinding that
// comes with it. Such a thread sleeps here instead, until the process is gone. All of this package
// gives and takes the lock by what stands here.
#pragma once

#include <cxxabi.h>
#include <nanobind/nanobind.h>

#include <memory>
#include <stop_token>

namespace tessera::python {

namespace nb = nanobind;

// Asks every job to stop at the end of the interpreter.
[[nodiscard]] std::stop_token ending();

// As long as somebody is at work the process goes on, for some seconds: at its end the memory of
// libraries is freed. Whoever waits for the interpreter's lock is not at work.
class AtWork {
 public:
  AtWork() noexcept;
  ~AtWork();
  AtWork(const AtWork&) = delete;
  AtWork& operator=(const AtWork&) = delete;
};

// Gives the lock away until the end of the block.
class Unlocked {
 public:
  Unlocked() : state_(PyEval_SaveThread()) {}
  ~Unlocked() { take(); }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

  // `call` with the lock.
  template <typename Call>
  void interrupted_by(const Call& call) {
    take();
    call();
    state_ = PyEval_SaveThread();
  }

 private:
  void take() noexcept;  // after the end it does not return

  PyThreadState* state_;
};

// What `work` returns, done by this thread without the lock.
template <typename Work>
auto without_lock(const Work& work) {
  const Unlocked unlocked;
  const AtWork at_work;
  return work();
}

// For a thread that is at work.
class Locked {
 public:
  Locked();  // throws `cancelled` after the end
  ~Locked();
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;

  [[noreturn]] static void sleep() noexcept;

 private:
  PyGILState_STATE state_;
};

// What `call` returns, called with the lock by a thread that is at work. Python code gives the lock
// away now and then, so that the end may come in it. Throws `cancelled` after the end.
template <typename Call>
auto with_lock(const Call& call) {
  const Locked lock;
  try {
    return call();
  } catch (abi::__forced_unwind&) {
    Locked::sleep();
  }
}

// The object for threads that do not have the lock: whoever drops it last takes the lock for that.
// After the end nobody drops it.
[[nodiscard]] std::shared_ptr<nb::object> shared(nb::object object);

// The module hears of the end.
void bind_ending(nb::module_& module);

}  // namespace tessera::python
