#include <algorithm>
#include <cstring>
#include <string_view>
#include <thread>
#include <utility>

#include "comm/whereabouts.h"
#include "same_host/same_host.h"

namespace tessera::same_host {
namespace {

using std::chrono::milliseconds;

constexpr std::size_t kLine = 64;
// Bytes of names with whereabouts, and of reasons; longer ones are cut.
constexpr std::size_t kNameBytes = kCalledBytes + 1, kReasonBytes = 15 * kLine - 4;
constexpr std::uint32_t kHere = 0, kLeft = 1, kFailed = 2;

// Between two looks at whether the awaited rank still lives.
constexpr milliseconds kLook{20};
// A round of small messages takes a few microseconds when every rank has a core; a sleep and a
// wake cost some ten.
constexpr int kSpins = 2000;

// Whether counter `have` has reached `need`; both wrap around.
bool reached(std::uint32_t have, std::uint32_t need) {
  return static_cast<std::int32_t>(have - need) >= 0;
}

void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#else
  std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

template <std::size_t Size>
void write_text(char (&field)[Size], const std::string& text) {
  const auto length = std::min(text.size(), Size - 1);
  std::memcpy(field, text.data(), length);
  std::memset(field + length, 0, Size - length);
}

}  // namespace

// The words sit on lines of their own: each has one writer, and readers that spin on it.
struct Exchange::RankState {
  alignas(kLine) SharedWord put;    // rounds that this rank has put
  alignas(kLine) SharedWord taken;  // rounds that this rank has taken: their slots are free for all
  alignas(kLine) SharedWord state;  // kHere, kLeft or kFailed
  char reason[kReasonBytes];        // why not kHere; written before `state`
};

struct alignas(kLine) Exchange::SlotHead {
  char name[kNameBytes];  // of the call whose round this is
};

std::size_t segment_bytes(int ranks, const RingSize& ring) {
  // RankState and SlotHead are private: their sizes are fixed here and asserted below.
  constexpr std::size_t kRankState = 17 * kLine, kSlotHead = 4 * kLine;
  return kSecretBytes + static_cast<std::size_t>(ranks) *
                            (kRankState + ring.slots * (kSlotHead + ring.slot_bytes));
}

Exchange::Exchange(Segment segment, int rank, const RingSize& ring, std::vector<Watch> watches)
    : segment_(std::move(segment)),
      rank_(rank),
      ring_(ring),
      watches_(std::move(watches)),
      // With more ranks than cores the awaited rank may need this one's core.
      spins_(watches_.size() <= std::thread::hardware_concurrency() ? kSpins : 0),
      slots_(watches_.size()) {
  static_assert(sizeof(RankState) == 17 * kLine && sizeof(SlotHead) == 4 * kLine);
}

Exchange::~Exchange() {
  if (!broken_) announce(kLeft, "has left");
}

// The segment began as zeros, which is what these words begin as.
Exchange::RankState& Exchange::state_of(int rank) const noexcept {
  return reinterpret_cast<RankState*>(segment_.data() + kSecretBytes)[rank];
}

std::byte* Exchange::slot_of(int rank, std::uint32_t round) const noexcept {
  const auto index = static_cast<std::size_t>(rank) * ring_.slots + round % ring_.slots;
  return reinterpret_cast<std::byte*>(&state_of(size())) +
         index * (sizeof(SlotHead) + ring_.slot_bytes);
}

std::uint64_t Exchange::start(Call call) {
  const std::lock_guard lock(mutex_);
  require_whole();
  call.name = called_here(call.name);
  calls_.push_back({std::move(call)});
  progress();
  return started_++;
}

bool Exchange::done(std::uint64_t number) {
  const std::lock_guard lock(mutex_);
  if (number < completed_) return true;
  require_whole();
  progress();
  return number < completed_;
}

void Exchange::wait(std::uint64_t number, milliseconds deadline) {
  const std::lock_guard lock(mutex_);
  const auto end = Clock::now() + deadline;
  while (number >= completed_) {
    require_whole();
    progress();
    if (number < completed_) return;
    // In order: a round that could not be put for want of room waits for that; one that was put
    // waits for the others. Whoever is furthest behind waits for nobody.
    const auto& first = calls_.front();
    const auto need = first.put == first.taken ? missing_room() : missing_bytes(first);
    if (need) wait_for(*need, end, deadline);
  }
}

void Exchange::abort() noexcept {
  aborted_.store(true, std::memory_order_release);
  // The thread that waits may sleep on a word of any rank; others look again and sleep on.
  for (int rank = 0; rank < size(); ++rank) {
    wake_all(state_of(rank).put);
    wake_all(state_of(rank).taken);
  }
}

void Exchange::require_whole() const {
  if (broken_) throw *broken_;
}

// The others must not wait for a round that this rank cannot finish.
template <typename Work>
void Exchange::carry_out(const Work& work) {
  try {
    work();
  } catch (const Error& error) {
    fail(error);
  } catch (const std::exception& error) {
    fail(Error(ErrorCode::peer_failed, error.what()));
  }
}

void Exchange::progress() {
  if (aborted_.load(std::memory_order_acquire)) {
    fail(Error(ErrorCode::peer_failed, "the collectives of this rank were aborted"));
  }
  for (bool moved = true; moved;) {
    moved = put_one();
    moved = take_one() || moved;
  }
}

bool Exchange::put_one() {
  if (putting_ == calls_.size() || missing_room()) return false;
  auto& pending = calls_[putting_];
  auto* slot = slot_of(rank_, rounds_put_);
  write_text(reinterpret_cast<SlotHead*>(slot)->name, pending.call.name);
  if (pending.call.put) carry_out([&] { pending.call.put(pending.put, slot + sizeof(SlotHead)); });
  auto& word = state_of(rank_).put;
  word.store(++rounds_put_, std::memory_order_release);
  wake_all(word);
  if (++pending.put == pending.call.rounds) ++putting_;
  return true;
}

bool Exchange::take_one() {
  if (calls_.empty()) return false;
  auto& pending = calls_.front();
  if (pending.taken == pending.put || missing_bytes(pending)) return false;
  const auto& call = pending.call;
  for (int peer = 0; peer < size(); ++peer) {
    if (call.source == kEveryone || call.source == peer) check_name(call, peer);
    slots_[static_cast<std::size_t>(peer)] = slot_of(peer, rounds_taken_) + sizeof(SlotHead);
  }
  if (call.take) carry_out([&] { call.take(pending.taken, slots_); });
  auto& word = state_of(rank_).taken;
  word.store(++rounds_taken_, std::memory_order_release);
  wake_all(word);
  if (++pending.taken == call.rounds) {
    calls_.pop_front();
    --putting_;
    ++completed_;
  }
  return true;
}

// The slot of the next round is free when every rank has taken the round that used it before.
std::optional<Exchange::Need> Exchange::missing_room() const {
  const auto before = rounds_put_ + 1 - static_cast<std::uint32_t>(ring_.slots);
  for (int peer = 0; peer < size(); ++peer) {
    auto& word = state_of(peer).taken;
    const auto value = word.load(std::memory_order_acquire);
    if (!reached(value, before)) return Need{peer, &word, value};
  }
  return std::nullopt;
}

std::optional<Exchange::Need> Exchange::missing_bytes(const Pending& pending) const {
  for (int peer = 0; peer < size(); ++peer) {
    if (pending.call.source != kEveryone && pending.call.source != peer) continue;
    auto& word = state_of(peer).put;
    const auto value = word.load(std::memory_order_acquire);
    if (!reached(value, rounds_taken_ + 1)) return Need{peer, &word, value};
  }
  return std::nullopt;
}

void Exchange::check_name(const Call& call, int peer) {
  const auto* head = reinterpret_cast<const SlotHead*>(slot_of(peer, rounds_taken_));
  const std::string_view theirs(head->name, ::strnlen(head->name, sizeof head->name));
  if (compared_part(call.name) != compared_part(theirs))
    fail(different_calls(rank_, call.name, peer, theirs));
}

void Exchange::wait_for(const Need& need, Clock::time_point end, milliseconds deadline) {
  const auto same = [&] { return need.word->load(std::memory_order_acquire) == need.value; };
  for (int i = 0; i < spins_; ++i) {
    if (!same()) return;
    pause_briefly();
  }
  while (same() && !aborted_.load(std::memory_order_acquire)) {
    const auto left = std::chrono::duration_cast<milliseconds>(end - Clock::now());
    if (left.count() <= 0) {
      fail(Error(ErrorCode::timeout, "timed out after " + std::to_string(deadline.count()) +
                                         " ms: rank " + std::to_string(need.rank) +
                                         " did not come to " +
                                         to_sentence(calls_.front().call.name)));
    }
    sleep_while(*need.word, need.value, std::min(left + milliseconds(1), kLook));
    if (same()) check_alive(need);
  }
}

void Exchange::check_alive(const Need& need) {
  const auto& peer = state_of(need.rank);
  const auto state = peer.state.load(std::memory_order_acquire);
  const bool runs = watches_[static_cast<std::size_t>(need.rank)].alive();
  if (state == kHere && runs) return;
  // What it did before it went counts.
  if (need.word->load(std::memory_order_acquire) != need.value) return;
  const auto who = "rank " + std::to_string(need.rank);
  const std::string reason(peer.reason, ::strnlen(peer.reason, sizeof peer.reason));
  const auto what = state == kHere ? "the process of " + who + " has ended" : who + " " + reason;
  fail(Error(ErrorCode::peer_failed, what + "; rank " + std::to_string(rank_) + " waits in " +
                                         to_sentence(calls_.front().call.name)));
}

void Exchange::fail(Error error) {
  broken_ = std::move(error);
  calls_.clear();
  putting_ = 0;
  announce(kFailed, "has failed: " + broken_->message());
  throw *broken_;
}

void Exchange::announce(std::uint32_t state, const std::string& reason) noexcept {
  auto& mine = state_of(rank_);
  write_text(mine.reason, reason);
  mine.state.store(state, std::memory_order_release);
  wake_all(mine.put);
  wake_all(mine.taken);
}

}  // namespace tessera::same_host
