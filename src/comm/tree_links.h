// The tree along which messages of many ranks travel.
//
// A rank's children lead the parts, as equal as can be, into which the ranks behind it are cut, so
// each subtree is a row of ranks without gaps and messages combine in rank order.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stop_token>
#include <string>
#include <vector>

#include "comm/edge.h"
#include "tessera/comm.h"

namespace tessera {

inline constexpr int kFanOut = 32;  // children of a rank at most

struct TreePlace {
  int parent = -1;            // -1: this is rank 0
  std::vector<int> children;  // ascending
};

// The place of rank `rank` of `size` ranks.
[[nodiscard]] TreePlace place_in_tree(int rank, int size);

// What a fold along the tree gives rank 0: messages[r] is of rank r, and there is at least one.
[[nodiscard]] Bytes fold_along_tree(std::vector<Bytes> messages, const Combine& combine);

// TreeLinks: this rank's place in a tree of ranks. It has the edges to the neighbours, watches over
// them, and carries failures and interrupts on.
//
// A failure is told to all neighbours, and each tells its others, so all ranks get the first that
// they hear of, which names the rank that is at fault. Letters are checked against what this rank
// calls: ranks that call different things get `mismatch`.

struct TreeOptions {
  // A neighbour that gives no sign of life for so long while this rank waits counts as lost.
  std::chrono::milliseconds silence = std::chrono::seconds(30);
  // How long a collective waits for ranks that are alive.
  std::chrono::milliseconds longest_wait = std::chrono::hours(1);
};

class TreeLinks final : private EdgeOwner {
 public:
  TreeLinks(int rank, int size, const TreeOptions& options);
  ~TreeLinks() override;
  TreeLinks(const TreeLinks&) = delete;
  TreeLinks& operator=(const TreeLinks&) = delete;

  [[nodiscard]] const TreePlace& place() const noexcept { return place_; }
  // To the parent or a child. A neighbour that is added late learns of an earlier failure.
  void add(int peer, std::unique_ptr<Wire> wire);

  // These are of a collective; the thread that calls it alone uses them.
  //
  // Begins the next call, of this name.
  void begin(std::string called);
  void give(int peer, std::shared_ptr<const Bytes> content);
  // Waits for what the peer gives in this call.
  [[nodiscard]] Bytes take(int peer);
  // Waits until all that was given is sent.
  void finish();

  // Breaks the group: all ranks are told. The first failure stays.
  void fail(const Error& failure);
  // Throws the failure that broke the group, if any.
  void require_whole();
  // Throws what broke the group, or for a neighbour that gives no sign of life. The process may
  // have been stopped since it began the last call but one: then it waits for as long as a
  // neighbour needs for a sign of life, and so hears what the others said while it did not listen.
  void require_neighbours();
  // After a failure: gives the other ranks a moment to hear of it before this one may leave.
  void let_others_hear();

  // Any thread may call these. The token is of what this rank does before its next fold.
  [[nodiscard]] std::stop_token interrupted();
  void interrupt();
  void fold_done();
  void make_progress(std::uint64_t bytes);

 private:
  using Lock = std::unique_lock<std::mutex>;
  using Clock = Edge::Clock;

  struct Neighbour {
    std::unique_ptr<Edge> edge;
    std::deque<Letter> letters;   // not yet taken
    std::optional<Call> waiting;  // the last call in which it said that it waits
    std::uint64_t taken = 0;      // the call of the last letter that was taken
    bool left = false;            // it needs the group no more
  };

  void letter_came(int peer, Letter letter) override;
  void peer_waits(int peer, Call call) override;
  void peer_interrupts(int peer, std::uint64_t fold) override;
  void peer_tells_failure(int peer, const Error& failure) override;
  void peer_left(int peer) override;
  void peer_lost(int peer, const Error& why) override;
  void all_sent() override;
  [[nodiscard]] Pulse pulse() override;

  // The first failure breaks the group; `from`: the neighbour that knows of it already, or -1.
  void break_up(const Error& failure, int from, int culprit);
  void spread_interrupt(std::uint64_t fold, int from);

  // Waits for `peer`, or with -1 for all neighbours, until `done`. Throws what breaks the group.
  void wait(Lock& lock, int peer, const std::function<bool()>& done);
  [[nodiscard]] int awaited_rank() const;
  void require_sign_of_life(Clock::time_point since, Clock::time_point now);
  void require_in_time(Clock::time_point begin, Clock::time_point now);
  void require_same_calls();
  [[nodiscard]] Error mismatch_with(int peer, const Call& theirs) const;
  [[nodiscard]] bool all_quiet(int except) const;

  const int rank_;
  const TreePlace place_;
  const TreeOptions options_;

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::map<int, Neighbour> neighbours_;  // by rank
  std::optional<Error> broken_;
  int culprit_ = -1;        // the neighbour that cannot be told, or -1
  std::uint64_t call_ = 0;  // the number of this rank's last
  Clock::time_point began_ = Clock::now(), began_before_ = began_;  // it, and the one before
  std::map<std::uint64_t, std::string> called_;                     // the names of its last ones
  int awaited_ = -1;                                      // the neighbour that this rank waits for
  std::uint64_t folds_ = 0;                               // done
  std::map<std::uint64_t, std::stop_source> interrupts_;  // by fold, from folds_ on
  std::uint64_t progress_ = 0;
};

}  // namespace tessera
