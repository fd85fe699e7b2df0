#include "ending.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <utility>

#include "tessera/error.h"

namespace tessera::python {
namespace {

// A job that does not hear that it is to stop (its server is silent) does not hold up the end.
constexpr std::chrono::milliseconds kPatience{5000};
constexpr std::chrono::milliseconds kLook{1};

std::atomic<bool> is_over = false;
std::atomic<int> at_work = 0;

std::stop_source& source = *new std::stop_source;  // for threads that go on to the very end

[[noreturn]] void sleep_forever() noexcept {
  while (true) ::pause();
}

// The module goes. Other threads have no part in Python any more, and what they had there is still
// in memory, as is the interpreter.
void at_end(void* /*nothing*/) noexcept {
  is_over = true;
  source.request_stop();
  const auto until = std::chrono::steady_clock::now() + kPatience;
  while (at_work > 0 && std::chrono::steady_clock::now() < until)
    std::this_thread::sleep_for(kLook);
}

}  // namespace

std::stop_token ending() {
  return source.get_token();
}

AtWork::AtWork() noexcept {
  ++at_work;
}
AtWork::~AtWork() {
  --at_work;
}

void Unlocked::take() noexcept {
  try {
    PyEval_RestoreThread(state_);
  } catch (abi::__forced_unwind&) {
    sleep_forever();
  }
}

Locked::Locked() {
  if (is_over) throw Error(ErrorCode::cancelled, "the interpreter has ended");
  try {
    state_ = PyGILState_Ensure();
  } catch (abi::__forced_unwind&) {
    sleep();
  }
}
Locked::~Locked() {
  PyGILState_Release(state_);
}
void Locked::sleep() noexcept {
  --at_work;
  sleep_forever();
}

std::shared_ptr<nb::object> shared(nb::object object) {
  return {new nb::object(std::move(object)), [](nb::object* last) {
            if (!last->is_valid()) {  // somebody took it
              delete last;
              return;
            }
            try {
              with_lock([&] { delete last; });
            } catch (const Error&) {  // the interpreter has ended, and its objects with it
            }
          }};
}

void bind_ending(nb::module_& module) {
  static const int nothing = 0;
  module.attr("_end") = nb::capsule(&nothing, at_end);
  // What threads hold that have not ended is no leak.
  nb::set_leak_warnings(false);
  // A child has none of the threads.
  (void)::pthread_atfork(nullptr, nullptr, [] { at_work = 0; });
}

}  // namespace tessera::python
