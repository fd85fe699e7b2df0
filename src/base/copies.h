// Copies of a caller's memory that go on after the call that began them, and the steps of an
// optimizer, which wait for them.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>

namespace tessera {

class Decision;

// Says, while it lives, that this process copies memory that must not change meanwhile. What a
// child of fork() has of it says nothing.
class CopyUnderWay {
 public:
  CopyUnderWay();
  ~CopyUnderWay();
  CopyUnderWay(const CopyUnderWay&) = delete;
  CopyUnderWay& operator=(const CopyUnderWay&) = delete;

 private:
  const std::shared_ptr<Decision> ended_;
};

// Returns when none of the copies that are under way now is any more. Whatever of the library
// writes to parameters or to the state of an optimizer calls it before.
void await_copies();

// await_copies(), by a step that begins. What watches steps hears when it does.
void begin_step();

// The time from the step before it was made to the first one that begins while it lives. Several
// threads may ask it, and a child of fork() hears of its own steps alone.
class StepWatch {
 public:
  StepWatch();
  ~StepWatch();
  StepWatch(const StepWatch&) = delete;
  StepWatch& operator=(const StepWatch&) = delete;

  // None: one of the two has not begun.
  [[nodiscard]] std::optional<std::chrono::nanoseconds> between() const;

 private:
  const std::uint64_t number_;
};

}  // namespace tessera
