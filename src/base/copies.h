// Copies of a caller's memory that go on after the call that began them, and the steps of an
// optimizer, which wait for them.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <stop_token>

namespace tessera {

struct CopyState;

// A copy of memory that must not change meanwhile. Its caller is the thread that makes this: what
// changes the memory runs on that thread. Members may be called from any thread; what a child of
// fork() has of it does nothing.
class CopyUnderWay {
 public:
  CopyUnderWay();
  ~CopyUnderWay();
  CopyUnderWay(const CopyUnderWay&) = delete;
  CopyUnderWay& operator=(const CopyUnderWay&) = delete;

  // The copy is made. Returns true when `question` has been asked, which throws nothing: by the
  // caller when it passes, and so has ended what it had begun; or by this thread, if that takes
  // longer than `within` while the process runs. False: `stop` came first. Once, or not at all.
  // Whoever asks holds nothing of this.
  [[nodiscard]] bool ask_caller(std::function<void()> question, std::chrono::milliseconds within,
                                const std::stop_token& stop);
  // Nobody waits for the caller for longer than that once all is copied.
  void hurry(std::chrono::milliseconds within);
  // It is made, or never will be. Nobody is asked any more.
  void end();
  // Waits until the copy is made. The caller is asked then.
  void pass();
  // The same if it is made before the time is over. Returns whether it is.
  bool pass_within(std::chrono::milliseconds time);

 private:
  const std::shared_ptr<CopyState> state_;
};

// Passes all copies that are under way, unless this thread makes one. Whatever of the library
// writes to parameters or to the state of an optimizer calls it before.
void await_copies();

// await_copies(), by a step that begins. What watches steps of this thread hears when it does.
void begin_step();

// The time from the step before it was made to the first one that begins while it lives, both by
// the thread that makes it. Several threads may ask it, and a child of fork() hears of its own
// steps alone.
class StepWatch {
 public:
  // `question`: asked once, when that step begins. What it throws goes no further.
  explicit StepWatch(std::function<void()> question = {});
  ~StepWatch();
  StepWatch(const StepWatch&) = delete;
  StepWatch& operator=(const StepWatch&) = delete;

  // None: one of the two has not begun.
  [[nodiscard]] std::optional<std::chrono::nanoseconds> between() const;
  // Whether `question` has thrown.
  [[nodiscard]] bool has_failed() const;

 private:
  const std::uint64_t number_;
};

}  // namespace tessera
