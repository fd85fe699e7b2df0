#include "comm/rendezvous.h"

#include <algorithm>
#include <utility>

#include "comm/whereabouts.h"

namespace tessera {

Rendezvous::Rendezvous(int ranks, std::chrono::milliseconds deadline)
    : deadline_(deadline),
      contributions_(static_cast<std::size_t>(ranks)),
      calls_(static_cast<std::size_t>(ranks)) {}

Rendezvous::Round Rendezvous::meet(int rank, const std::string& call, Contribution contribution) {
  const auto what = with_purpose(call);
  Lock lock(mutex_);
  if (broken_) throw *broken_;
  const auto mine = static_cast<std::size_t>(rank);
  contributions_[mine] = std::move(contribution);
  calls_[mine] = what;
  const std::uint64_t round = rounds_;
  if (++arrived_ == calls_.size()) {
    complete_round();
  } else {
    const auto done = [&] { return rounds_ != round || broken_.has_value(); };
    if (!changed_.wait_for(lock, deadline_, done)) {
      break_up(Error(ErrorCode::timeout, what + " waited " + std::to_string(deadline_.count()) +
                                             " ms for " + absent_ranks()));
    }
  }
  // A completed round counts even when somebody has left since. `last_` cannot be overwritten
  // before this rank has come to the next round.
  if (rounds_ == round) throw *broken_;
  return last_;
}

void Rendezvous::complete_round() {
  const auto other = std::find_if(calls_.begin(), calls_.end(),
                                  [this](const std::string& call) { return call != calls_[0]; });
  if (other != calls_.end()) {
    break_up(Error(ErrorCode::mismatch, "rank 0 called " + calls_[0] + ", rank " +
                                            std::to_string(other - calls_.begin()) + " called " +
                                            *other));
    return;
  }
  last_ = std::make_shared<const std::vector<Contribution>>(
      std::exchange(contributions_, std::vector<Contribution>(calls_.size())));
  std::fill(calls_.begin(), calls_.end(), std::string());
  arrived_ = 0;
  ++rounds_;
  changed_.notify_all();
}

void Rendezvous::leave(int rank, const std::string& reason) {
  const Lock lock(mutex_);
  break_up(Error(ErrorCode::peer_failed, "rank " + std::to_string(rank) + " " + reason));
}

void Rendezvous::break_up(Error error) {
  if (!broken_) broken_ = std::move(error);
  changed_.notify_all();
}

std::string Rendezvous::absent_ranks() const {
  std::string text;
  for (std::size_t rank = 0; rank < calls_.size(); ++rank) {
    if (calls_[rank].empty()) text += (text.empty() ? "rank " : ", rank ") + std::to_string(rank);
  }
  return text;
}

}  // namespace tessera
