// Group: the ranks that do something together, without saying how they talk.
//
// Messages here are small (plans, errors, results); tensors travel by the runtime's own transport.
// Every member is collective: all ranks of the group call it, in the same order; ranks that call
// different members, or the same for different ends (one saves, one trains), get `mismatch`. A call
// that cannot finish because a peer is gone or late throws `timeout` or `peer_failed` within the
// deadline, on every rank that is still there; after that the group is broken and every later call
// throws at once. One thread a rank; a Group is not shared between threads.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/error.h"

namespace tessera {

using Bytes = std::vector<std::byte>;

class Group {
 public:
  virtual ~Group() = default;
  Group() = default;
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  [[nodiscard]] virtual int rank() const noexcept = 0;
  [[nodiscard]] virtual int size() const noexcept = 0;

  virtual void barrier() = 0;
  // On `root`: the message of every rank, in rank order. Elsewhere: empty.
  virtual std::vector<Bytes> gather(const Bytes& mine, int root = 0) = 0;
  // On every rank: the message of every rank, in rank order.
  virtual std::vector<Bytes> all_gather(const Bytes& mine) = 0;
  // `message` matters on `root` only; every rank gets it.
  virtual Bytes broadcast(const Bytes& message, int root = 0) = 0;
  // `messages` matters on `root` only and has one entry a rank; rank r gets entry r.
  virtual Bytes scatter(const std::vector<Bytes>& messages, int root = 0) = 0;
};

// One rank, alone: every member returns at once.
[[nodiscard]] std::unique_ptr<Group> solo_group();

// Runs `body` on `ranks` threads, each with its own Group, and joins them all. When ranks fail, the
// first failure by rank that is not merely "a peer failed" is rethrown here.
void run_ranks(int ranks, const std::function<void(Group&)>& body,
               std::chrono::milliseconds deadline = std::chrono::seconds(30));

// Runs `work` on every rank and then lets all ranks agree: returns when it succeeded
// everywhere; otherwise throws on every rank Error::from_peers with the failures of the ranks that
// failed: with their code where they share one, else `peer_failed`. Exceptions other than Error are
// reported as `io` with their text. Collective.
void agree(Group& group, const std::string& operation, const std::function<void()>& work);

}  // namespace tessera
