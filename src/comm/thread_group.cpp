#include "comm/thread_group.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <thread>
#include <utility>

#include "comm/whereabouts.h"
#include "tessera/comm.h"

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

// Overriders take the messages over.
// NOLINTBEGIN(performance-unnecessary-value-param)
Bytes Group::fold(Bytes mine, const Combine& combine) {
  std::vector<Bytes> messages = gather(mine, 0);
  if (messages.empty()) return {};
  Bytes all = std::move(messages.front());
  for (std::size_t rank = 1; rank < messages.size(); ++rank)
    all = combine(std::move(all), std::move(messages[rank]));
  return all;
}

Bytes Group::spread(Bytes message) {
  return broadcast(message, 0);
}
// NOLINTEND(performance-unnecessary-value-param)

namespace {

void require_me(int root) {
  if (root != 0) {
    throw Error(ErrorCode::invalid_argument, "root is rank " + std::to_string(root) + " of 1");
  }
}

class SoloGroup final : public Group {
 public:
  [[nodiscard]] int rank() const noexcept override { return 0; }
  [[nodiscard]] int size() const noexcept override { return 1; }
  void barrier() override {}
  std::vector<Bytes> gather(const Bytes& mine, int root) override {
    require_me(root);
    return {mine};
  }
  std::vector<Bytes> all_gather(const Bytes& mine) override { return {mine}; }
  Bytes broadcast(const Bytes& message, int root) override {
    require_me(root);
    return message;
  }
  Bytes scatter(const std::vector<Bytes>& messages, int root) override {
    require_me(root);
    if (messages.size() != 1) {
      throw Error(ErrorCode::invalid_argument,
                  std::to_string(messages.size()) + " messages to scatter to 1 rank");
    }
    return messages[0];
  }
};

}  // namespace

std::unique_ptr<Group> solo_group() {
  return std::make_unique<SoloGroup>();
}

namespace {

// One rank of a group of threads.
class ThreadGroup final : public Group {
 public:
  ThreadGroup(Rendezvous& rendezvous, int rank, int size)
      : rendezvous_(rendezvous), rank_(rank), size_(size) {}

  [[nodiscard]] int rank() const noexcept override { return rank_; }
  [[nodiscard]] int size() const noexcept override { return size_; }

  void barrier() override { (void)rendezvous_.meet(rank_, "barrier", {}); }

  std::vector<Bytes> gather(const Bytes& mine, int root) override {
    const auto round = rendezvous_.meet(rank_, named("gather", root), {mine});
    return rank_ == root ? messages_of(*round) : std::vector<Bytes>();
  }

  std::vector<Bytes> all_gather(const Bytes& mine) override {
    return messages_of(*rendezvous_.meet(rank_, "all_gather", {mine}));
  }

  Bytes broadcast(const Bytes& message, int root) override {
    Rendezvous::Contribution mine;
    if (rank_ == root) mine.push_back(message);
    const auto round = rendezvous_.meet(rank_, named("broadcast", root), std::move(mine));
    return round->at(static_cast<std::size_t>(root)).at(0);
  }

  Bytes scatter(const std::vector<Bytes>& messages, int root) override {
    Rendezvous::Contribution mine;
    if (rank_ == root) mine = messages;
    const auto round = rendezvous_.meet(rank_, named("scatter", root), std::move(mine));
    const auto& sent = (*round)[static_cast<std::size_t>(root)];
    // Judged after the exchange, so that every rank gets the error and nobody waits.
    if (sent.size() != static_cast<std::size_t>(size_)) {
      throw Error(ErrorCode::invalid_argument, std::to_string(sent.size()) +
                                                   " messages to scatter to " +
                                                   std::to_string(size_) + " ranks");
    }
    return sent[static_cast<std::size_t>(rank_)];
  }

  Bytes fold(Bytes mine, const Combine& combine) override {
    Bytes all = Group::fold(std::move(mine), combine);
    ++folds_;
    return all;
  }

  [[nodiscard]] bool carries_interrupts() const noexcept override { return true; }
  void interrupt() override { rendezvous_.interrupt(folds_); }
  [[nodiscard]] std::stop_token interrupted() override {
    return rendezvous_.interrupted(rank_, folds_);
  }

 private:
  // The name that all ranks must agree on; refuses a root that is no rank.
  [[nodiscard]] std::string named(const char* call, int root) const {
    if (root < 0 || root >= size_) {
      throw Error(ErrorCode::invalid_argument,
                  "root is rank " + std::to_string(root) + " of " + std::to_string(size_));
    }
    return std::string(call) + " with root " + std::to_string(root);
  }

  static std::vector<Bytes> messages_of(const std::vector<Rendezvous::Contribution>& round) {
    std::vector<Bytes> messages;
    messages.reserve(round.size());
    for (const auto& contribution : round) messages.push_back(contribution.at(0));
    return messages;
  }

  Rendezvous& rendezvous_;
  const int rank_;
  const int size_;
  std::atomic<std::uint64_t> folds_ = 0;  // that this rank has done
};

// How the body of one rank ended.
struct Ending {
  std::exception_ptr failure;  // null: it returned
  bool own = false;            // it failed by itself, not because a peer had
};

Ending run_rank(Rendezvous& rendezvous, int rank, int size,
                const std::function<void(Group&)>& body) {
  ThreadGroup group(rendezvous, rank, size);
  try {
    body(group);
    rendezvous.leave(rank, "has returned");
    return {};
  } catch (const Error& error) {
    rendezvous.leave(rank, std::string("failed: ") + error.what());
    const bool own = error.code() != ErrorCode::peer_failed || !error.peers().empty();
    return {std::current_exception(), own};
  } catch (const std::exception& error) {
    rendezvous.leave(rank, std::string("failed: ") + error.what());
    return {std::current_exception(), true};
  } catch (...) {
    rendezvous.leave(rank, "failed");
    return {std::current_exception(), true};
  }
}

}  // namespace

void run_ranks(int ranks, const std::function<void(Group&)>& body,
               std::chrono::milliseconds deadline) {
  if (ranks < 1) {
    throw Error(ErrorCode::invalid_argument, std::to_string(ranks) + " ranks, expected at least 1");
  }
  Rendezvous rendezvous(ranks, deadline);
  std::vector<Ending> endings(static_cast<std::size_t>(ranks));
  {
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < ranks; ++rank) {
      threads.emplace_back([&, rank] {
        endings[static_cast<std::size_t>(rank)] = run_rank(rendezvous, rank, ranks, body);
      });
    }
  }
  const auto own =
      std::find_if(endings.begin(), endings.end(), [](const Ending& e) { return e.own; });
  if (own != endings.end()) std::rethrow_exception(own->failure);
  const auto any = std::find_if(endings.begin(), endings.end(),
                                [](const Ending& e) { return e.failure != nullptr; });
  if (any != endings.end()) std::rethrow_exception(any->failure);
}

}  // namespace tessera
