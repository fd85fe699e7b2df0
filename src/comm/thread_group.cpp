#include <algorithm>
#include <atomic>
#include <exception>
#include <thread>
#include <utility>

#include "comm/rendezvous.h"
#include "tessera/comm.h"

namespace tessera {
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
