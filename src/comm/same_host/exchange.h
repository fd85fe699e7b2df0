// Exchange: the ranks of one host hand each other bytes through shared memory, in rounds.
//
// Every rank has a ring of slots that it alone writes. In a round each rank puts its bytes into its
// next slot and then takes what it wants from the slots of the others; round n of all ranks uses
// slot n modulo the ring. Calls are queued and their rounds happen in the order of the calls, which
// is the same on all ranks. There is no helper thread: rounds happen inside start, done and wait,
// as far as the ring has room (start, done) or until the call is complete (wait).
// docs/design/same-host.md has the protocol.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/same_host/futex.h"
#include "comm/same_host/process.h"
#include "comm/same_host/segment.h"
#include "tessera/error.h"

namespace tessera::same_host {

// Of a rank's ring. A call up to slots * slot_bytes long needs no peer to start.
struct RingSize {
  std::size_t slots = 32;              // a power of two
  std::size_t slot_bytes = 256 << 10;  // a multiple of 64
};

// Of the whole segment.
[[nodiscard]] std::size_t segment_bytes(int ranks, const RingSize& ring);
// Where the maker of a segment leaves a secret by which the others know it.
inline constexpr std::size_t kSecretBytes = 64;

inline constexpr int kEveryone = -1;
inline constexpr int kNobody = -2;

struct Call {
  // What is called, with all that has to be equal on all ranks: compared with the name that
  // `source` gives, the first kComparedBytes of it. The starting thread's whereabouts travel along.
  std::string name;
  std::int64_t rounds = 1;
  // Whose slots `take` reads: a rank, kEveryone or kNobody. A round waits for those only.
  int source = kEveryone;
  // Writes this rank's bytes of a round; empty: it has none.
  std::function<void(std::int64_t round, std::byte* slot)> put = {};
  // Reads `slots`, one a rank, of which those of `source` are filled; empty: nothing to read.
  std::function<void(std::int64_t round, std::span<const std::byte* const> slots)> take = {};
  // What they throw breaks the exchange.
  // Keeps alive what `put` and `take` use; may be null.
  std::shared_ptr<const void> owner = {};
};

class Exchange {
 public:
  // `watches`: of the processes of all ranks.
  Exchange(Segment segment, int rank, const RingSize& ring, std::vector<Watch> watches);
  // Peers that still wait for this rank get `peer_failed`.
  ~Exchange();
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  [[nodiscard]] int rank() const noexcept { return rank_; }
  [[nodiscard]] int size() const noexcept { return static_cast<int>(watches_.size()); }
  [[nodiscard]] std::size_t slot_bytes() const noexcept { return ring_.slot_bytes; }

  // Queues a call and does what can be done of the queue without waiting. Answers the call's
  // number. What `put` reads has to stay as it is until the call is done.
  std::uint64_t start(Call call);
  // Whether a call is complete; does what can be done without waiting.
  [[nodiscard]] bool done(std::uint64_t number);
  // Returns when the call, and with it all before it, is complete. Throws `timeout` when a peer
  // does not come within `deadline`, `peer_failed` when its process ends, its Exchange goes or it
  // has failed itself, `mismatch` when it called something else.
  void wait(std::uint64_t number, std::chrono::milliseconds deadline);
  // From any thread: whoever waits here gets `peer_failed`.
  void abort() noexcept;

  // The first failure breaks the exchange on this rank: queued calls are forgotten and start, done
  // and wait throw that failure again. The others learn of it when they next need this rank.

 private:
  using Clock = std::chrono::steady_clock;

  struct RankState;  // a rank's words in the segment
  struct SlotHead;   // in front of a slot's bytes
  struct Pending {
    Call call;
    std::int64_t put = 0;    // rounds
    std::int64_t taken = 0;  // rounds
  };
  // What a rank cannot go on without: `word` of `rank` to leave `value`.
  struct Need {
    int rank;
    SharedWord* word;
    std::uint32_t value;
  };

  [[nodiscard]] RankState& state_of(int rank) const noexcept;
  [[nodiscard]] std::byte* slot_of(int rank, std::uint32_t round) const noexcept;

  template <typename Work>
  void carry_out(const Work& work);
  void require_whole() const;
  void progress();
  [[nodiscard]] bool put_one();
  [[nodiscard]] bool take_one();
  [[nodiscard]] std::optional<Need> missing_room() const;
  [[nodiscard]] std::optional<Need> missing_bytes(const Pending& pending) const;
  void check_name(const Call& call, int peer);
  void wait_for(const Need& need, Clock::time_point end, std::chrono::milliseconds deadline);
  void check_alive(const Need& need);
  [[noreturn]] void fail(Error error);
  void announce(std::uint32_t state, const std::string& reason) noexcept;

  Segment segment_;
  const int rank_;
  const RingSize ring_;
  const std::vector<Watch> watches_;
  const int spins_;  // looks at a word before sleeping
  std::atomic<bool> aborted_ = false;

  std::mutex mutex_;  // guards everything below
  std::deque<Pending> calls_;
  std::size_t putting_ = 0;       // index of the first call with rounds to put
  std::uint64_t completed_ = 0;   // calls
  std::uint64_t started_ = 0;     // calls
  std::uint32_t rounds_put_ = 0;  // of all calls; they wrap around
  std::uint32_t rounds_taken_ = 0;
  std::vector<const std::byte*> slots_;  // of the round being taken
  std::optional<Error> broken_;
};

}  // namespace tessera::same_host
