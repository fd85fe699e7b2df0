// SaveFrequency: saves as often as a share of the training pays for.
//
//   CheckpointWriter writer;
//   SaveFrequency frequency;  // of several ranks, over the group that saves
//   for (std::int64_t step = 1; step <= 1000; ++step) {
//     const Value tree = Value::dict({{"step", step}});  // what the step has made
//     if (frequency.due()) frequency.began(writer.save(tree, "run/step" + std::to_string(step)));
//   }
//
// What a save costs is all the time that steps take longer while it is under way, and what its call
// takes: it is measured, on all ranks, and the dearest rank counts. What a save costs that failed
// says nothing: the next one is due as many steps later as the one before, or as the first.
#pragma once

#include <cstdint>
#include <memory>

#include "tessera/checkpoint_writer.h"
#include "tessera/comm.h"

namespace [[gnu::visibility("default")]] tessera {

struct FrequencyOptions {
  double share = 0.02;      // of the time of training that all saves together may cost
  std::int64_t first = 10;  // steps before the first save, of which nobody knows what it costs
  std::int64_t least = 1;   // steps between two saves at least, though they cost nothing
  std::int64_t most = 0;    // likewise at most, whatever they cost; 0: any
};

// One thread of each rank uses it.
class SaveFrequency {
 public:
  // The group must outlive it, and has the ranks that save. Throws `invalid_argument` for a share
  // that is not above 0 and at most 1, fewer than 3 steps before the first save, `least` below 1,
  // and `most` that is negative or below `least`.
  explicit SaveFrequency(Group& group, const FrequencyOptions& options = {});
  // For one process.
  explicit SaveFrequency(const FrequencyOptions& options = {});
  ~SaveFrequency();
  SaveFrequency(const SaveFrequency&) = delete;
  SaveFrequency& operator=(const SaveFrequency&) = delete;

  // Every rank calls it once behind each step. Whether all save now: never before the last save is
  // decided on every rank. Collective, but messages are sent only where a save may be due, and a
  // note of the log has each new distance.
  [[nodiscard]] bool due();
  // The save that due() asked for, where it goes on in the background: it costs until it is
  // decided. Where this is never called, what happens until the next due() is the save; once it
  // was, a save without it is one that has failed.
  void began(PendingSave save);

  // Steps from one save to the next, as known now; 0: nothing is known yet.
  [[nodiscard]] std::int64_t distance() const noexcept;

 private:
  class Costs;
  std::shared_ptr<Group> alone_;  // null: the caller has a group
  Group& group_;
  std::unique_ptr<Costs> costs_;
};

}  // namespace tessera
