// RunLease: one job at a time goes on with a run.
//
//   RunLease lease("run");  // throws `conflict` while another job has it
//   ...
//   lease.require_held();  // before each save
//
// Two jobs that save into one run replace each other's checkpoints. The one that comes second is
// `conflict`, unless the first is dead: on this host that is seen at once, of another one when it
// has given no sign for as long as it had said. No clocks are compared.
//
// In the run it is the object `tessera-lease-N.txt` while the job lives; N is 1, or one more than
// that of a dead job whose run it has taken.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <stop_token>

#include "tessera/comm.h"
#include "tessera/location.h"

namespace [[gnu::visibility("default")]] tessera {

struct LeaseOptions {
  // A job that gives no sign for so long may be taken for dead. It gives six in this time. A second
  // to a day.
  std::chrono::milliseconds expires = std::chrono::seconds(60);
  // Ends the wait for a sign of the job that has the run: `cancelled`.
  std::stop_token stop = {};
};

class RunLease {
 public:
  // Takes the run. If another job has it, waits for a sign of life of that one: `conflict` if there
  // is one, a sixth of its time later at most, or if two come at once and this is the other one.
  // Then waits, for a minute at most, for the writer process of a job that has died on this host
  // and is still at its last save. Throws what the store throws, `unsupported` for one that lets
  // rivals in, `corrupt` for an object of that name that is none of ours, and `invalid_argument`
  // for a time out of its bounds.
  explicit RunLease(const Location& run, const LeaseOptions& options = {});
  // The same by rank 0 for all ranks, which throw alike. The group must outlive it. Collective.
  RunLease(const Location& run, Group& group, const LeaseOptions& options = {});
  // Gives the run back, if it is still this job's; a store that does not answer is not waited for
  // longer than ten seconds. In a child of fork() it does nothing.
  ~RunLease();
  RunLease(const RunLease&) = delete;
  RunLease& operator=(const RunLease&) = delete;

  // The number of the lease: higher than that of a job that may still believe to have the run.
  [[nodiscard]] std::uint64_t number() const noexcept;
  // Throws `conflict` if another job has taken the run, because this one was stopped or cut off
  // from the store for longer than its time: it must not save any more. Rank 0 asks the store;
  // collective.
  void require_held();
  // Is asked to stop, on rank 0, once that is known, or when two thirds of the time have passed
  // without a sign that the store took: for SaveOptions::stop.
  [[nodiscard]] std::stop_token lost() const noexcept;

 private:
  class Held;
  std::shared_ptr<Group> alone_;  // null: the caller has a group
  Group& group_;
  std::unique_ptr<Held> held_;  // null above rank 0
  std::uint64_t number_ = 0;
  std::stop_source never_;
};

}  // namespace tessera
