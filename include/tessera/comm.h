// Group: ranks that work together, however they communicate.
//
// Messages here are small (plans, errors, results); tensors travel by the runtime's own transport.
// Every member is collective: all ranks of the group call it, in the same order. Ranks that call
// different members, or one member for different purposes (one saves, one trains), get `mismatch`.
// If a call cannot finish because a peer is gone or late, it throws `timeout` or `peer_failed`
// within the deadline, on every rank that is still there. After that the group is broken, and every
// later call throws at once. Each rank uses one thread; threads do not share a Group.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <stop_token>
#include <string>
#include <vector>

#include "tessera/error.h"

namespace [[gnu::visibility("default")]] tessera {

using Bytes = std::vector<std::byte>;

// Makes one message of two. It is associative; `left` is of lower ranks than `right`.
using Combine = std::function<Bytes(Bytes left, Bytes right)>;

class Group {
 public:
  virtual ~Group() = default;
  Group() = default;
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;
  [[nodiscard]] virtual int rank() const noexcept = 0;
  [[nodiscard]] virtual int size() const noexcept = 0;
  virtual void barrier() = 0;
  // On `root`: the messages of all ranks, in rank order. Elsewhere: empty.
  virtual std::vector<Bytes> gather(const Bytes& mine, int root = 0) = 0;
  // On every rank: the messages of all ranks, in rank order.
  virtual std::vector<Bytes> all_gather(const Bytes& mine) = 0;
  // `message` matters only on `root`; every rank gets it.
  virtual Bytes broadcast(const Bytes& message, int root = 0) = 0;
  // `messages` matters only on `root` and has one entry per rank; rank r gets entry r.
  virtual Bytes scatter(const std::vector<Bytes>& messages, int root = 0) = 0;

  // On rank 0: the messages of all ranks, combined in rank order. Elsewhere: empty. `combine` runs
  // on any of the ranks and must not throw. A group of many ranks overrides this and `spread` so
  // that messages travel along a tree; these ask for `gather` and `broadcast`.
  virtual Bytes fold(Bytes mine, const Combine& combine);
  // On every rank: the message of rank 0, on which alone it matters.
  virtual Bytes spread(Bytes message);

  // Not collective, for any thread. Whether these do anything; else ranks ask by collectives:
  [[nodiscard]] virtual bool carries_interrupts() const noexcept { return false; }
  virtual void interrupt() {}  // asks all ranks to end what leads to the next fold: this one failed
  // Stop is requested when a rank has interrupted that, or is lost.
  [[nodiscard]] virtual std::stop_token interrupted() { return {}; }
  virtual void make_progress(std::uint64_t bytes_so_far) { static_cast<void>(bytes_so_far); }
  // Throws if a peer is known to be lost: the last look before a step that nobody can take back.
  virtual void require_peers() {}
};

// A group of one rank: every member returns at once.
[[nodiscard]] std::unique_ptr<Group> solo_group();

// Runs `body` on `ranks` threads, each with its own Group, and joins them all. If ranks fail, it
// rethrows the failure of the lowest rank that says more than "a peer failed".
void run_ranks(int ranks, const std::function<void(Group&)>& body,
               std::chrono::milliseconds deadline = std::chrono::seconds(30));

// Runs `work` on every rank, and then lets all ranks agree on how it went. Returns if it succeeded
// everywhere. Otherwise it throws Error::from_peers with the ranks' failures on every rank: with
// the code that they share, else `peer_failed`. Of more than 16 ranks that failed it has the lowest
// 16 and the number of the rest. An exception other than Error is reported as `io` with its text.
// Collective: one fold and one spread.
void agree(Group& group, const std::string& operation, const std::function<void()>& work);

}  // namespace tessera
