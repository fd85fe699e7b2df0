// Copies of a caller's memory that go on after the call that began them, and the steps of an
// optimizer, which wait for them.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

namespace tessera {

struct CopyState;

// A copy of memory that must not change meanwhile. Members may be called from any thread; what a
// child of fork() has of it does nothing.
class CopyUnderWay {
 public:
  CopyUnderWay();
  ~CopyUnderWay();
  CopyUnderWay(const CopyUnderWay&) = delete;
  CopyUnderWay& operator=(const CopyUnderWay&) = delete;

  // The copy is made. `then`, which throws nothing: what the first thread that passes does before
  // any passes; null: nothing. Once.
  void end(std::function<void()> then);
  // Waits until the copy is made, and for `then`.
  void pass();
  // The same if it is made before the time is over.
  void pass_within(std::chrono::milliseconds time);

 private:
  const std::shared_ptr<CopyState> state_;
};

// Passes all copies that are under way. Whatever of the library writes to parameters or to the
// state of an optimizer calls it before.
void await_copies();

// await_copies(), by a step that begins. What watches steps hears when it does.
void begin_step();

// The time from the step before it was made to the first one that begins while it lives. Several
// threads may ask it, and a child of fork() hears of its own steps alone.
class StepWatch {
 public:
  // `ask`: called once, when that step begins, on its thread. What it throws goes no further.
  explicit StepWatch(std::function<void()> ask = {});
  ~StepWatch();
  StepWatch(const StepWatch&) = delete;
  StepWatch& operator=(const StepWatch&) = delete;

  // None: one of the two has not begun.
  [[nodiscard]] std::optional<std::chrono::nanoseconds> between() const;
  // Whether `ask` has thrown.
  [[nodiscard]] bool has_failed() const;

 private:
  const std::uint64_t number_;
};

}  // namespace tessera
