// What saves cost, and how far apart they have to be.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>

#include "tessera/save_frequency.h"

namespace tessera {

// The steps of one rank. Seconds.
class StepCosts {
 public:
  // A step, or what lies between two of them, took so long; `saving`: a save was under way when it
  // began.
  void add_step(double seconds, bool saving);
  // The save that was under way is decided. `counts`: it has not failed.
  void end_save(bool counts = true);

  // The median of the last steps without a save; 0: there was none.
  [[nodiscard]] double step() const;
  // The mean of the last saves: by how much their steps were longer than others. None: there was
  // none.
  [[nodiscard]] std::optional<double> save() const;

 private:
  std::deque<double> steps_;
  std::deque<double> saves_;
  double present_ = 0;  // of the save under way: its steps
  std::int64_t present_steps_ = 0;
};

// Steps from one save to the next, so that saves which cost so much take at most `options.share` of
// the time of steps which take so long, within `least` and `most` of the options.
[[nodiscard]] std::int64_t steps_apart(double save_seconds, double step_seconds,
                                       const FrequencyOptions& options);

}  // namespace tessera
