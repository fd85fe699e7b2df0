// Whether a save is copied beside the next step, or waited for.
#pragma once

#include <array>
#include <chrono>
#include <optional>
#include <vector>

#include "base/copies.h"
#include "tessera/checkpoint_writer.h"

namespace tessera {

// Of one writer. One thread uses it at a time.
class OverlapChoice {
 public:
  explicit OverlapChoice(Overlap how) : how_(how) {}

  // For a save that begins now. While it measures, the first save counts for nothing, since it
  // makes the arena, and neither does one that has no step of an optimizer before it and behind it.
  [[nodiscard]] bool is_beside_step();

 private:
  using Times = std::vector<std::chrono::nanoseconds>;

  void note_last();
  void choose();

  Overlap how_;
  bool is_first_ = true;
  std::array<Times, 2> taken_;      // by a step with a save that waited, and with one that did not
  std::optional<StepWatch> watch_;  // of the last save that counts
  bool was_beside_ = false;         // how that one was done
};

}  // namespace tessera
