// Whether a save is copied beside the next step, or waited for.
#pragma once

#include <array>
#include <chrono>
#include <functional>
#include <optional>
#include <vector>

#include "base/copies.h"
#include "tessera/checkpoint_writer.h"

namespace tessera {

// Of one writer. One thread uses it at a time. A program that changes between a save and the next
// step what it saves has its saves wait, unless it asks for Overlap::always.
class OverlapChoice {
 public:
  explicit OverlapChoice(Overlap how) : is_measured_(how == Overlap::measured), how_(how) {}

  // For a save that begins now. While it measures, the first save counts for nothing, since it
  // makes the arena, and neither does one that has no step of an optimizer before it and behind it,
  // by the thread that saves, or has another save between these.
  // `require_unchanged`: throws if what is saved was changed meanwhile; null: nobody can tell.
  [[nodiscard]] bool is_beside_step(std::function<void()> require_unchanged = {});
  // What was copied beside a step was changed meanwhile.
  void note_change();
  // The save that has begun copies nothing: what it takes says nothing.
  void note_failure() { counts_ = false; }

 private:
  using Times = std::vector<std::chrono::nanoseconds>;

  [[nodiscard]] bool note_last();
  void choose();

  const bool is_measured_;
  Overlap how_;
  bool is_first_ = true;
  std::array<Times, 2> taken_;      // by a step with a save that waited, and with one that did not
  std::optional<StepWatch> watch_;  // of the last save,
  bool counts_ = false;             // whether that one counts,
  bool was_beside_ = false;         // and how it was done
};

}  // namespace tessera
