// Where threads that act as ranks meet: the one primitive under every collective of a thread group.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
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

 private:
  using Lock = std::unique_lock<std::mutex>;

  void complete_round();
  void break_up(Error error);  // keeps the first error and wakes everybody
  [[nodiscard]] std::string absent_ranks() const;

  const std::chrono::milliseconds deadline_;
  std::mutex mutex_;  // guards everything below
  std::condition_variable changed_;
  std::vector<Contribution> contributions_;  // of the round under way
  std::vector<std::string> calls_;           // what each rank called; empty: not here yet
  std::size_t arrived_ = 0;
  std::uint64_t rounds_ = 0;  // completed
  Round last_;                // what the last completed round gave
  std::optional<Error> broken_;
};

}  // namespace tessera
