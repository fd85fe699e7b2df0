// Collectives of ranks that share a host, through memory that they share: no libtorch, any
// transport may use them.
#pragma once

#include <algorithm>
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

#include "comm/segment.h"
#include "tessera/error.h"
#include "tessera/layout.h"

namespace tessera::same_host {

// Exchange: the ranks of one host hand each other bytes through shared memory, in rounds.
//
// Every rank has a ring of slots that it alone writes. In a round each rank puts its bytes into its
// next slot and then takes what it wants from the slots of the others; round n of all ranks uses
// slot n modulo the ring. Calls are queued and their rounds happen in the order of the calls, which
// is the same on all ranks. There is no helper thread: rounds happen inside start, done and wait,
// as far as the ring has room (start, done) or until the call is complete (wait).
// docs/design/same-host.md has the protocol.

// The size of a rank's ring. A call up to slots * slot_bytes long needs no peer to start.
struct RingSize {
  std::size_t slots = 32;              // a power of two
  std::size_t slot_bytes = 256 << 10;  // a multiple of 64
};

// The size of the whole segment.
[[nodiscard]] std::size_t segment_bytes(int ranks, const RingSize& ring);
// The size of the secret that the maker of a segment leaves in it, by which the others know it.
inline constexpr std::size_t kSecretBytes = 64;

inline constexpr int kEveryone = -1;
inline constexpr int kNobody = -2;

struct Call {
  // The name of the call, with all that has to be equal on all ranks: compared with the name that
  // `source` gives, the first kComparedBytes of it. The starting thread's whereabouts travel along.
  std::string name;
  std::int64_t rounds = 1;
  // The ranks whose slots `take` reads: one, kEveryone or kNobody. A round waits for those only.
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
  // The condition that a rank waits for: `word` of `rank` to leave `value`.
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

// How ranks find out together whether they share a host, and map their shared memory.

// A place where ranks leave texts for each other: a c10d store, or a map in tests. What is posted
// stays.
class Board {
 public:
  virtual ~Board() = default;
  Board() = default;
  Board(const Board&) = delete;
  Board& operator=(const Board&) = delete;
  virtual void post(const std::string& key, const std::string& text) = 0;
  // Nothing when nobody has posted `key` yet.
  [[nodiscard]] virtual std::optional<std::string> read(const std::string& key) = 0;
};

struct MeetOptions {
  bool wanted = true;                                 // false: this rank does not take part
  std::chrono::milliseconds deadline{5 * 60 * 1000};  // for the peers to come
  RingSize ring = {};
};

struct Meeting {
  std::unique_ptr<Exchange> exchange;  // null on all ranks or on none
  std::string reason;                  // of null: "rank 2: ..."
};

// Collective, over a board that no other meeting uses. The answer is an exchange when every rank
// wants one, all name the same host, and every rank has mapped the memory that rank 0 made: proved,
// not assumed. Throws `timeout` when a peer does not come, `peer_failed` when one has ended.
[[nodiscard]] Meeting meet(Board& board, int rank, int size, const MeetOptions& options);

// Element-wise reduction of what several ranks hold, the same bits on every rank.

enum class Reduction : std::uint8_t { sum, average, minimum, maximum };

// float32, float64, float16, bfloat16: all four. int8 to int64, uint8: all but average; sums wrap
// around. bool: as sum and maximum "any", as minimum "all". Nothing else.
[[nodiscard]] bool can_reduce(DType dtype, Reduction reduction) noexcept;

// out[i] = sources[0][i] + sources[1][i] + ..., in that order, for i < elements. float16 and
// bfloat16 are added in float32 and rounded once, at the end; an average divides before that.
// Minimum and maximum of NaN and anything are NaN. `out` may be one of the sources. Requires
// can_reduce.
void reduce(DType dtype, Reduction reduction, std::span<const std::byte* const> sources,
            std::byte* out, std::size_t elements);

// The collectives as calls of an Exchange, over plain memory.
//
// Arrays longer than a slot go in slices of a round each. A function says what is to be done,
// Exchange::start does it. `name` has to tell everything that must be equal, sizes included; an
// `owner` is for the caller to set.

// How an array of `bytes` is cut into rounds of at most `most`.
struct Slices {
  std::size_t bytes;
  std::size_t most;

  // An empty array takes a round too: whoever calls it meets the others.
  [[nodiscard]] std::int64_t rounds() const noexcept {
    return bytes == 0 ? 1 : static_cast<std::int64_t>((bytes + most - 1) / most);
  }
  [[nodiscard]] std::size_t begin(std::int64_t round) const noexcept {
    return static_cast<std::size_t>(round) * most;
  }
  [[nodiscard]] std::size_t size(std::int64_t round) const noexcept {
    return std::min(most, bytes - begin(round));
  }
};
// Each round a slot, or a slot in equal parts for each rank.
[[nodiscard]] Slices whole_slots(const Exchange& exchange, std::size_t bytes);
[[nodiscard]] Slices shared_slots(const Exchange& exchange, std::size_t bytes);

// Every rank waits for every other.
[[nodiscard]] Call barrier_call();

// `bytes` from each rank; `outs`: where those of each rank go, on `root` or, for kEveryone, on all;
// empty elsewhere. `in` may be one of them.
struct GatherArguments {
  const std::byte* in;
  std::vector<std::byte*> outs;
  std::size_t bytes;
  int root;
};
[[nodiscard]] Call gather_call(const Exchange& exchange, std::string name, GatherArguments args);

// `bytes` for each rank; `ins`: those for each rank, on `root`; empty elsewhere.
struct ScatterArguments {
  std::vector<const std::byte*> ins;
  std::byte* out;
  std::size_t bytes;
  int root;
};
[[nodiscard]] Call scatter_call(const Exchange& exchange, std::string name, ScatterArguments args);

// `data`: sent by `root`, filled elsewhere.
struct BroadcastArguments {
  std::byte* data;
  std::size_t bytes;
  int root;
};
[[nodiscard]] Call broadcast_call(const Exchange& exchange, std::string name,
                                  const BroadcastArguments& args);

// The arguments of reduce(). all_reduce: `elements` in all, `in` may be `out`. reduce_scatter:
// `elements` for each rank, `ins`: this rank's for each rank; `out` may be this rank's own of them.
struct ReduceArguments {
  DType dtype;
  Reduction reduction;
  std::byte* out;
  std::size_t elements;
};
[[nodiscard]] Call all_reduce_call(const Exchange& exchange, std::string name, const std::byte* in,
                                   const ReduceArguments& args);
[[nodiscard]] Call reduce_scatter_call(const Exchange& exchange, std::string name,
                                       std::vector<const std::byte*> ins,
                                       const ReduceArguments& args);

}  // namespace tessera::same_host
