#include "comm/rendezvous.h"

#include <algorithm>
#include <utility>

#include "comm/whereabouts.h"

namespace tessera {

Rendezvous::Rendezvous(int ranks, std::chrono::milliseconds deadline)
    : deadline_(deadline),
      contributions_(static_cast<std::size_t>(ranks)),
      calls_(static_cast<std::size_t>(ranks)),
      working_(static_cast<std::size_t>(ranks)) {}

Rendezvous::Round Rendezvous::meet(int rank, const std::string& call, Contribution contribution) {
  const auto what = with_purpose(call);
  Lock lock(mutex_);
  if (broken_) throw *broken_;
  const auto mine = static_cast<std::size_t>(rank);
  contributions_[mine] = std::move(contribution);
  calls_[mine] = what;
  working_[mine] = false;
  const std::uint64_t round = rounds_;
  if (++arrived_ == calls_.size()) {
    complete_round();
  } else {
    const auto done = [&] { return rounds_ != round || broken_.has_value(); };
    if (!wait(lock, done)) {
      break_up(Error(ErrorCode::timeout, what + " waited " + std::to_string(deadline_.count()) +
                                             " ms for " + absent_ranks()));
    }
  }
  // A completed round counts even when somebody has left since. `last_` cannot be overwritten
  // before this rank has come to the next round.
  if (rounds_ == round) throw *broken_;
  return last_;
}

bool Rendezvous::wait(Lock& lock, const std::function<bool()>& done) {
  while (!changed_.wait_for(lock, deadline_, done)) {
    if (std::ranges::find(working_, true) == working_.end()) return false;
  }
  return true;
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

std::stop_token Rendezvous::interrupted(int rank, std::uint64_t fold) {
  const Lock lock(mutex_);
  working_[static_cast<std::size_t>(rank)] = true;
  return interrupt_of(fold).get_token();
}

void Rendezvous::interrupt(std::uint64_t fold) {
  std::stop_source source;
  {
    const Lock lock(mutex_);
    source = interrupt_of(fold);
  }
  source.request_stop();  // runs callbacks, which may call this
}

std::stop_source& Rendezvous::interrupt_of(std::uint64_t fold) {
  std::stop_source& source = interrupts_[fold];
  if (broken_) source.request_stop();
  // A rank may still be one fold behind, never two.
  while (interrupts_.begin()->first + 1 < fold) interrupts_.erase(interrupts_.begin());
  return source;
}

void Rendezvous::break_up(Error error) {
  if (!broken_) broken_ = std::move(error);
  for (auto& [fold, source] : interrupts_) source.request_stop();
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
