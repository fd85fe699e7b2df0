#include "base/fork.h"

#include <pthread.h>
#include <sched.h>

#include "tessera/error.h"

namespace tessera {
namespace {

// Threads are counted while they are where nobody may fork, and kept from coming in by one that is
// about to.
struct Gate {
  std::atomic<std::uint64_t> number{1};
  std::atomic<int> inside{0};  // threads
  std::atomic<bool> is_shut{false};
};

Gate& gate() noexcept {
  static constinit Gate gate;
  return gate;
}

thread_local int depth = 0;  // of this thread's NoFork

// This thread, if a hook or a signal handler forks where it may not: waiting for itself would not
// end.
int counted_of_this_thread() noexcept {
  return depth > 0 ? 1 : 0;
}

void before_fork() noexcept {
  while (gate().is_shut.exchange(true)) ::sched_yield();  // another thread forks
  while (gate().inside.load() > counted_of_this_thread()) ::sched_yield();
}

void in_parent() noexcept {
  gate().is_shut = false;
}

void in_child() noexcept {
  ++gate().number;
  gate().inside = counted_of_this_thread();
  gate().is_shut = false;
}

[[maybe_unused]] const int kRegistered = ::pthread_atfork(before_fork, in_parent, in_child);

}  // namespace

std::uint64_t process_number() noexcept {
  return gate().number.load(std::memory_order_relaxed);
}

void require_own_connections(const MadeHere& made) {
  if (made) return;
  throw Error(ErrorCode::invalid_argument,
              "this process was forked after its mesh was made, and the mesh is its parent's: make "
              "a mesh in the child");
}

void NoFork::enter() noexcept {
  if (depth++ > 0) return;
  while (true) {
    ++gate().inside;
    if (!gate().is_shut) return;
    --gate().inside;
    while (gate().is_shut) ::sched_yield();
  }
}

void NoFork::leave() noexcept {
  if (--depth == 0) --gate().inside;
}

}  // namespace tessera
