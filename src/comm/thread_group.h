// The place where threads that act as ranks meet: the one primitive under every collective of a
// thread group.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stop_token>
#include <string>
#include <vector>

#include "tessera/comm.h"

namespace tessera {

class Rendezvous {
 public:
  using Contribution = std::vector<Bytes>;
  using Round = std::shared_ptr<const std::vector<Contribution>>;

  Rendezvous(int ranks, std::chrono::milliseconds deadline);

  // Hands in rank's contribution and returns those of all ranks, in rank order, when all have come.
  // Throws `mismatch` when ranks call different things or for different purposes, `timeout` when
  // one does not come within the deadline, `peer_failed` when one has left. The first such failure
  // breaks the rendezvous: all ranks that wait, and every later call, get it too.
  [[nodiscard]] Round meet(int rank, const std::string& call, Contribution contribution);

  // The rank comes no more, because its body has returned or failed (`reason`).
  void leave(int rank, const std::string& reason);

  // The token of what the ranks do before their fold number `fold`: the same for all of them. Stop
  // is requested by interrupt() and when the rendezvous breaks. Until `rank` meets the others again
  // it counts as working, which takes as long as it takes: no deadline passes.
  [[nodiscard]] std::stop_token interrupted(int rank, std::uint64_t fold);
  void interrupt(std::uint64_t fold);

 private:
  using Lock = std::unique_lock<std::mutex>;

  void complete_round();
  void break_up(Error error);  // keeps the first error and wakes everybody
  // Returns whether `done`; not before a deadline has passed in which nobody worked.
  [[nodiscard]] bool wait(Lock& lock, const std::function<bool()>& done);
  [[nodiscard]] std::string absent_ranks() const;
  [[nodiscard]] std::stop_source& interrupt_of(std::uint64_t fold);

  const std::chrono::milliseconds deadline_;
  std::mutex mutex_;  // guards everything below
  std::condition_variable changed_;
  std::vector<Contribution> contributions_;  // of the round under way
  std::vector<std::string> calls_;           // what each rank called; empty: not here yet
  std::vector<bool> working_;                // not here yet for that reason
  std::size_t arrived_ = 0;
  std::uint64_t rounds_ = 0;  // completed
  Round last_;                // what the last completed round gave
  std::optional<Error> broken_;
  std::map<std::uint64_t, std::stop_source> interrupts_;  // by fold; those long past are gone
};

}  // namespace tessera
