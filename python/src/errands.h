// The interpreter's lock for threads that may not have it.
//
// The thread of a CheckpointWriter runs only where a processor has nothing else to do. With the
// lock in its hand it would hold up all of Python until one has.
#pragma once

#include <functional>
#include <memory>
#include <thread>

namespace tessera::python {

// A thread that does with the lock what other threads need of Python. It has the priority of
// whoever made it.
class Errands {
 public:
  Errands();
  ~Errands();
  Errands(const Errands&) = delete;
  Errands& operator=(const Errands&) = delete;

  // Returns when `errand` has been run. Throws what it throws, and `cancelled` after the end of the
  // interpreter. One thread at a time may call it, and has to be at work.
  void run(const std::function<void()>& errand);

  // Whether the calling thread is on an errand: one that waits for this.
  [[nodiscard]] static bool is_on() noexcept;

 private:
  struct State;
  const std::shared_ptr<State> state_;  // the thread has it, too: in a child of fork() it stays
  std::unique_ptr<std::thread> thread_;
  const int process_;
};

}  // namespace tessera::python
