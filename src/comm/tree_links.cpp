#include "comm/tree_links.h"

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "comm/whereabouts.h"

namespace tessera {
namespace {

// The ranks of a subtree: `root` and those behind it.
struct Subtree {
  int root = 0;
  int end = 0;
};

std::vector<Subtree> subtrees_of(const Subtree& tree) {
  const std::int64_t below = tree.end - tree.root - 1;
  const std::int64_t parts = std::min<std::int64_t>(kFanOut, below);
  const auto begin_of = [&](std::int64_t part) {
    return static_cast<int>(tree.root + 1 + below * part / parts);
  };
  std::vector<Subtree> subtrees;
  for (std::int64_t part = 0; part < parts; ++part)
    subtrees.push_back({begin_of(part), begin_of(part + 1)});
  return subtrees;
}

Bytes fold_subtree(const Subtree& tree, std::vector<Bytes>& messages, const Combine& combine) {
  Bytes all = std::move(messages[static_cast<std::size_t>(tree.root)]);
  for (const Subtree& below : subtrees_of(tree))
    all = combine(std::move(all), fold_subtree(below, messages, combine));
  return all;
}

}  // namespace

TreePlace place_in_tree(int rank, int size) {
  TreePlace place;
  Subtree tree{0, size};
  while (tree.root != rank) {
    place.parent = tree.root;
    const std::vector<Subtree> below = subtrees_of(tree);
    tree = *std::ranges::find_if(below, [rank](const Subtree& part) { return rank < part.end; });
  }
  for (const Subtree& below : subtrees_of(tree)) place.children.push_back(below.root);
  return place;
}

Bytes fold_along_tree(std::vector<Bytes> messages, const Combine& combine) {
  return fold_subtree({0, static_cast<int>(messages.size())}, messages, combine);
}

namespace {

using std::chrono::milliseconds;

// How long a rank that leaves or has failed waits for neighbours to take its last words.
constexpr milliseconds kLastWords{1000};
constexpr std::size_t kCallsKept = 8;

std::string named(int rank) {
  return "rank " + std::to_string(rank);
}

// How often an edge gives a sign of life.
milliseconds beat_of(const TreeOptions& options) {
  return std::clamp<milliseconds>(options.silence / 4, milliseconds(1), std::chrono::seconds(1));
}

std::string in_words(milliseconds time) {
  return std::to_string(time.count()) + " ms";
}

}  // namespace

TreeLinks::TreeLinks(int rank, int size, const TreeOptions& options)
    : rank_(rank), place_(place_in_tree(rank, size)), options_(options) {}

// No lock is held while threads of edges end: they take it.
TreeLinks::~TreeLinks() {
  for (auto& [peer, neighbour] : neighbours_) neighbour.edge->post_farewell();
  {
    Lock lock(mutex_);
    changed_.wait_for(lock, std::min(kLastWords, options_.silence),
                      [this] { return all_quiet(-1); });
  }
  for (auto& [peer, neighbour] : neighbours_) neighbour.edge->stop();
}

void TreeLinks::add(int peer, std::unique_ptr<Wire> wire) {
  const auto beat = beat_of(options_);
  const Lock lock(mutex_);
  EdgeOwner& owner = *this;
  auto edge = std::make_unique<Edge>(std::move(wire), peer, owner, beat);
  if (broken_) edge->post_failure(*broken_);
  neighbours_[peer].edge = std::move(edge);
}

void TreeLinks::begin(std::string called) {
  const Lock lock(mutex_);
  called_[++call_] = std::move(called);
  began_before_ = std::exchange(began_, Clock::now());
  if (called_.size() > kCallsKept) called_.erase(called_.begin());
}

void TreeLinks::give(int peer, std::shared_ptr<const Bytes> content) {
  const Lock lock(mutex_);
  if (broken_) throw Error(*broken_);
  Neighbour& to = neighbours_.at(peer);
  if (to.left) throw Error(ErrorCode::peer_failed, named(peer) + " has left the group");
  to.edge->post({call_, called_[call_]}, std::move(content));
}

Bytes TreeLinks::take(int peer) {
  Lock lock(mutex_);
  Neighbour& from = neighbours_.at(peer);
  wait(lock, peer, [&] { return !from.letters.empty(); });
  Letter letter = std::move(from.letters.front());
  from.letters.pop_front();
  const bool same = compared_part(letter.call.name) == compared_part(called_[call_]);
  if (letter.call.number != call_ || !same) throw mismatch_with(peer, letter.call);
  from.taken = call_;
  return std::move(letter.content);
}

void TreeLinks::finish() {
  Lock lock(mutex_);
  wait(lock, -1, [this] {
    return std::ranges::all_of(neighbours_, [](const auto& n) { return n.second.edge->quiet(); });
  });
}

void TreeLinks::wait(Lock& lock, int peer, const std::function<bool()>& done) {
  const auto tick =
      std::clamp<milliseconds>(options_.silence / 8, milliseconds(1), milliseconds(250));
  const auto begin = Clock::now();
  auto since = begin, last = begin;
  awaited_ = peer;
  while (!broken_ && !changed_.wait_for(lock, tick, [&] { return broken_ || done(); })) {
    const auto now = Clock::now();
    // This process did not run for a while, so nobody listened either.
    if (now - last > tick + options_.silence / 2) since = now;
    last = now;
    require_sign_of_life(since, now);
    require_same_calls();
    require_in_time(begin, now);
    if (peer < 0) continue;
    Neighbour& neighbour = neighbours_.at(peer);
    if (neighbour.left) throw Error(ErrorCode::peer_failed, named(peer) + " has left the group");
    if (peer == place_.parent) neighbour.edge->post_waiting({call_, called_.at(call_)});
  }
  awaited_ = -1;
  // What has come counts, whatever broke the group since.
  if (broken_ && !done()) throw Error(*broken_);
}

void TreeLinks::require_sign_of_life(Clock::time_point since, Clock::time_point now) {
  for (const auto& [peer, neighbour] : neighbours_) {
    if (neighbour.left || now - std::max(since, neighbour.edge->last_heard()) <= options_.silence)
      continue;
    culprit_ = peer;
    throw Error(ErrorCode::timeout, named(peer) + " has given no sign of life for " +
                                        in_words(options_.silence) +
                                        ": its process or its host is stopped or cut off");
  }
}

void TreeLinks::require_in_time(Clock::time_point begin, Clock::time_point now) {
  if (now - begin <= options_.longest_wait) return;
  const int late = awaited_rank();
  std::string text = named(late) + " is alive but did not come to " +
                     to_sentence(called_.at(call_)) + " within " + in_words(options_.longest_wait);
  if (const auto found = neighbours_.find(late); found != neighbours_.end()) {
    text += "; it has moved " + std::to_string(found->second.edge->last_pulse().progress) +
            " bytes so far";
  }
  throw Error(ErrorCode::timeout, text);
}

// The one at the end of the chain of ranks that wait for one another.
int TreeLinks::awaited_rank() const {
  if (awaited_ < 0) return -1;
  const int theirs = neighbours_.at(awaited_).edge->last_pulse().awaited;
  return theirs >= 0 && theirs != rank_ ? theirs : awaited_;
}

// A child that waits for this rank's word, while this rank waits for the child's.
void TreeLinks::require_same_calls() {
  if (awaited_ < 0 || awaited_ == place_.parent) return;
  for (const int child : place_.children) {
    const Neighbour& neighbour = neighbours_.at(child);
    const bool owes = neighbour.taken < call_ && neighbour.letters.empty();
    if (owes && neighbour.waiting && neighbour.waiting->number >= call_)
      throw mismatch_with(child, *neighbour.waiting);
  }
}

Error TreeLinks::mismatch_with(int peer, const Call& theirs) const {
  const auto same_number = called_.find(theirs.number);
  const auto mine = same_number != called_.end() ? same_number : std::prev(called_.end());
  const Error error = different_calls(rank_, mine->second, peer, theirs.name);
  if (compared_part(mine->second) != compared_part(theirs.name)) return error;
  return {error.code(), error.message() + "; these are their calls number " +
                            std::to_string(call_) + " and " + std::to_string(theirs.number)};
}

void TreeLinks::fail(const Error& failure) {
  int culprit = -1;
  {
    const Lock lock(mutex_);
    culprit = culprit_;
  }
  break_up(failure, -1, culprit);
}

void TreeLinks::break_up(const Error& failure, int from, int culprit) {
  std::vector<std::stop_source> sources;
  {
    const Lock lock(mutex_);
    if (broken_) return;
    broken_ = failure;
    culprit_ = culprit;
    for (const auto& [fold, source] : interrupts_) sources.push_back(source);
    for (auto& [peer, neighbour] : neighbours_)
      if (peer != from) neighbour.edge->post_failure(failure);
  }
  changed_.notify_all();
  for (auto& source : sources) source.request_stop();
}

void TreeLinks::require_whole() {
  const Lock lock(mutex_);
  if (broken_) throw Error(*broken_);
}

void TreeLinks::require_neighbours() {
  Lock lock(mutex_);
  if (Clock::now() - began_before_ > options_.silence / 2)
    changed_.wait_for(lock, 2 * beat_of(options_), [this] { return broken_.has_value(); });
  if (broken_) throw Error(*broken_);
  require_sign_of_life({}, Clock::now());
}

bool TreeLinks::all_quiet(int except) const {
  return std::ranges::all_of(
      neighbours_, [except](const auto& n) { return n.first == except || n.second.edge->quiet(); });
}

void TreeLinks::let_others_hear() {
  Lock lock(mutex_);
  changed_.wait_for(lock, std::min(kLastWords, options_.silence),
                    [this] { return all_quiet(culprit_); });
}

std::stop_token TreeLinks::interrupted() {
  std::stop_source source;
  bool ended = false;
  {
    const Lock lock(mutex_);
    source = interrupts_[folds_];
    ended = broken_.has_value();
  }
  if (ended) source.request_stop();
  return source.get_token();
}

void TreeLinks::interrupt() {
  std::uint64_t fold = 0;
  {
    const Lock lock(mutex_);
    fold = folds_;
  }
  spread_interrupt(fold, -1);
}

void TreeLinks::spread_interrupt(std::uint64_t fold, int from) {
  std::stop_source source;
  {
    const Lock lock(mutex_);
    // Whoever is behind has a failed rank or its parent between itself and this one.
    if (fold < folds_) return;
    source = interrupts_[fold];
    if (source.stop_requested()) return;
    for (auto& [peer, neighbour] : neighbours_)
      if (peer != from) neighbour.edge->post_interrupt(fold);
  }
  source.request_stop();  // runs callbacks, which may call this
}

void TreeLinks::fold_done() {
  const Lock lock(mutex_);
  ++folds_;
  interrupts_.erase(interrupts_.begin(), interrupts_.lower_bound(folds_));
}

void TreeLinks::make_progress(std::uint64_t bytes) {
  const Lock lock(mutex_);
  progress_ = bytes;
}

void TreeLinks::letter_came(int peer, Letter letter) {
  {
    const Lock lock(mutex_);
    neighbours_.at(peer).letters.push_back(std::move(letter));
  }
  changed_.notify_all();
}

void TreeLinks::peer_waits(int peer, Call call) {
  const Lock lock(mutex_);
  neighbours_.at(peer).waiting = std::move(call);
}

void TreeLinks::peer_interrupts(int peer, std::uint64_t fold) {
  spread_interrupt(fold, peer);
}

void TreeLinks::peer_tells_failure(int peer, const Error& failure) {
  break_up(failure, peer, -1);
}

void TreeLinks::peer_left(int peer) {
  {
    const Lock lock(mutex_);
    neighbours_.at(peer).left = true;
  }
  changed_.notify_all();
}

// A closed connection looks different from each end and system: all neighbours say the same of it.
void TreeLinks::peer_lost(int peer, const Error& why) {
  const bool closed = why.code() == ErrorCode::peer_failed || why.code() == ErrorCode::timeout;
  const std::string text = closed ? named(peer) + " is gone: its connection has closed"
                                  : "hearing from " + named(peer) + ": " + why.message();
  break_up(Error(closed ? ErrorCode::peer_failed : why.code(), text), -1, peer);
}

void TreeLinks::all_sent() {
  {
    const Lock lock(mutex_);  // or a waiting thread could be about to sleep
  }
  changed_.notify_all();
}

Pulse TreeLinks::pulse() {
  const Lock lock(mutex_);
  return {.progress = progress_, .awaited = awaited_rank()};
}

}  // namespace tessera
