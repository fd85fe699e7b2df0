// Grace: a run that is told to end ends well, in the time that it is given.
//
//   Grace grace;  // of several ranks, over the group that saves
//   for (std::int64_t step = 1; step <= 1000; ++step) {
//     const Value tree = Value::dict({{"step", step}});  // what the step has made
//     if (!grace.ends()) continue;
//     if (grace.leaves_time_to_save()) {
//       SaveOptions options;
//       options.stop = grace.stop();
//       save(tree, "run/step" + std::to_string(step), options);
//     }
//     break;
//   }
//
// Schedulers send SIGTERM some time before they kill: Slurm by KillWait and `--signal`, torchrun
// 30 s, Kubernetes by terminationGracePeriodSeconds. It may come to one rank alone. All ranks act
// on it behind the same step, and a save begins only if the last ones say that it ends in time.
#pragma once

#include <chrono>
#include <csignal>
#include <memory>
#include <stop_token>
#include <vector>

#include "tessera/checkpoint_writer.h"
#include "tessera/comm.h"

namespace [[gnu::visibility("default")]] tessera {

struct GraceOptions {
  // From the signal to the kill. More than a year counts as one.
  std::chrono::milliseconds time = std::chrono::seconds(30);
  // Which signals count, the same on all ranks or not.
  std::vector<int> signals = {SIGTERM};
};

// While one lives, and the program does not handle them otherwise, its signals do not end the
// process: they are noted, however often they come, and a handler that the program had before is
// called, too. A child of fork() ends by them as by default. One thread of each rank uses it. A
// process may have several.
class Grace {
 public:
  // The group must outlive it. Throws `invalid_argument` for a time that is not above 0, and for a
  // signal that cannot be handled.
  explicit Grace(Group& group, const GraceOptions& options = {});
  // For one process.
  explicit Grace(const GraceOptions& options = {});
  // The last one that has a signal gives it back to whoever had it before.
  ~Grace();
  Grace(const Grace&) = delete;
  Grace& operator=(const Grace&) = delete;

  // Every rank calls it once behind each step. Whether the run is to end now: a signal has come to
  // some rank, or one has asked. The first time a note of the log says which rank, how much time is
  // left, and whether a save begins. Collective: a small message each time.
  [[nodiscard]] bool ends();
  // Asks for the end as a signal does: a program may know its scheduler's limit. Any thread.
  void ask() noexcept;

  // Once ends() was true, the same on all ranks. Whether a save ends in time, if it takes as long
  // as the longest of the last four on any rank, and what is left of one that is under way. Where
  // no save is known: whether any time is left.
  [[nodiscard]] bool leaves_time_to_save() const noexcept;
  // Is asked to stop shortly before the time is over, once ends() was true: a save that takes
  // longer than those before it leaves nothing half-written.
  [[nodiscard]] std::stop_token stop() const noexcept;

  // What saves take. A save that waits took so long; one in the background is asked by ends().
  void note_save(std::chrono::nanoseconds took);
  void began(PendingSave save);

 private:
  class Wish;
  std::shared_ptr<Group> alone_;  // null: the caller has a group
  Group& group_;
  std::unique_ptr<Wish> wish_;
};

}  // namespace tessera
