// What ranks tell one another beside plain messages: a list is the messages, each behind its size
// (8 bytes). What is scattered is the number of messages that the root gave (8 bytes) and, if that
// is the number of ranks, a list. Numbers are little-endian.
#include "comm/tree_group.h"

#include <algorithm>
#include <atomic>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/numbers.h"
#include "base/process.h"
#include "comm/confer.h"
#include "comm/tree_links.h"
#include "comm/whereabouts.h"

namespace tessera {
namespace {

Bytes joined(Bytes left, const Bytes& right) {
  left.insert(left.end(), right.begin(), right.end());
  return left;
}

Bytes filled(Bytes left, Bytes right) {
  return left.empty() ? std::move(right) : std::move(left);
}

void append_listed(Bytes& list, const Bytes& message) {
  append_le(list, static_cast<std::uint64_t>(message.size()));
  list.insert(list.end(), message.begin(), message.end());
}

Bytes listed(const Bytes& message) {
  Bytes list;
  append_listed(list, message);
  return list;
}

std::uint64_t take_number(std::span<const std::byte>& rest) {
  if (rest.size() < sizeof(std::uint64_t))
    throw Error(ErrorCode::corrupt, "a list of messages ends early");
  const auto number = load_le<std::uint64_t>(rest.data());
  rest = rest.subspan(sizeof number);
  return number;
}

std::vector<Bytes> messages_of(std::span<const std::byte> list) {
  std::vector<Bytes> messages;
  while (!list.empty()) {
    const auto size = take_number(list);
    if (size > list.size()) throw Error(ErrorCode::corrupt, "a list of messages ends early");
    const auto message = list.first(size);
    messages.emplace_back(message.begin(), message.end());
    list = list.subspan(size);
  }
  return messages;
}

class TreeGroup final : public Group {
 public:
  TreeGroup(int rank, int size, const TreeOptions& options)
      : rank_(rank), size_(size), links_(rank, size, options) {}

  // The group is not used yet.
  void connect_all(std::chrono::milliseconds deadline, const Connect& connect);

  [[nodiscard]] int rank() const noexcept override { return rank_; }
  [[nodiscard]] int size() const noexcept override { return size_; }

  void barrier() override {
    collective("barrier", [&](const std::string& called) {
      (void)up(called, {}, joined);
      (void)down(called, {});
    });
  }

  std::vector<Bytes> gather(const Bytes& mine, int root) override {
    require_rank(root);
    return collective("gather with " + named(root), [&](const std::string& called) {
      return messages_of(down_to(root, called, up(called, listed(mine), joined)));
    });
  }

  std::vector<Bytes> all_gather(const Bytes& mine) override {
    return collective("all_gather", [&](const std::string& called) {
      return messages_of(down(called, up(called, listed(mine), joined)));
    });
  }

  Bytes broadcast(const Bytes& message, int root) override {
    require_rank(root);
    return collective("broadcast with " + named(root), [&](const std::string& called) {
      return down(called, to_first(root, called, message));
    });
  }

  Bytes scatter(const std::vector<Bytes>& messages, int root) override;

  Bytes fold(Bytes mine, const Combine& combine) override {
    Bytes all = collective(
        "fold", [&](const std::string& called) { return up(called, std::move(mine), combine); });
    links_.fold_done();
    return all;
  }

  Bytes spread(Bytes message) override {
    return collective("spread",
                      [&](const std::string& called) { return down(called, std::move(message)); });
  }

  [[nodiscard]] bool carries_interrupts() const noexcept override { return true; }
  void interrupt() override { links_.interrupt(); }
  [[nodiscard]] std::stop_token interrupted() override { return links_.interrupted(); }
  void make_progress(std::uint64_t bytes) override { links_.make_progress(bytes); }
  void require_peers() override {
    require_own_connections(made_);
    links_.require_neighbours();
  }

 private:
  static std::string named(int root) { return "root " + std::to_string(root); }
  void require_rank(int root) const;

  template <typename Work>
  auto collective(const std::string& name, const Work& work)
      -> decltype(work(std::declval<std::string>()));
  void fail();

  // One way up the tree: on rank 0 the messages of all, combined; elsewhere empty.
  Bytes up(const std::string& called, Bytes mine, const Combine& combine);
  // One way down: rank 0's message.
  Bytes down(const std::string& called, Bytes message);
  // The same for `root` alone; empty on all others.
  Bytes down_to(int root, const std::string& called, Bytes message);
  // On rank 0: the message of `root`.
  Bytes to_first(int root, const std::string& called, const Bytes& message);
  void pass_on(const Bytes& count, const std::vector<Bytes>& messages);

  const int rank_;
  const int size_;
  const MadeHere made_;
  std::atomic<bool> called_ = false;  // some thread is in a collective
  TreeLinks links_;
};

void TreeGroup::require_rank(int root) const {
  if (root < 0 || root >= size_) {
    throw Error(ErrorCode::invalid_argument,
                "root is rank " + std::to_string(root) + " of " + std::to_string(size_));
  }
}

template <typename Work>
auto TreeGroup::collective(const std::string& name, const Work& work)
    -> decltype(work(std::declval<std::string>())) {
  require_own_connections(made_);
  if (called_.exchange(true)) {
    throw Error(ErrorCode::conflict,
                "two threads call one group at once: one of them calls " + with_purpose(name));
  }
  struct Leave {
    std::atomic<bool>& called;
    ~Leave() { called = false; }
  };
  const Leave leave{called_};
  links_.require_whole();
  try {
    return work(called_here(name));
  } catch (...) {
    fail();
    throw;  // not reached: the group is broken
  }
}

void TreeGroup::fail() {
  const auto failure = failure_of([] { throw; });
  links_.fail(*failure);
  links_.let_others_hear();
  links_.require_whole();
}

Bytes TreeGroup::up(const std::string& called, Bytes mine, const Combine& combine) {
  links_.begin(called);
  for (const int child : links_.place().children)
    mine = combine(std::move(mine), links_.take(child));
  if (rank_ == 0) return mine;
  links_.give(links_.place().parent, std::make_shared<const Bytes>(std::move(mine)));
  links_.finish();
  return {};
}

Bytes TreeGroup::down(const std::string& called, Bytes message) {
  links_.begin(called);
  if (rank_ != 0) message = links_.take(links_.place().parent);
  if (links_.place().children.empty()) return message;
  const auto told = std::make_shared<const Bytes>(std::move(message));
  for (const int child : links_.place().children) links_.give(child, told);
  links_.finish();
  return *told;
}

Bytes TreeGroup::down_to(int root, const std::string& called, Bytes message) {
  links_.begin(called);
  // From `root` upwards: whom this rank passes the message to, if it is on the way.
  int next = -1, at = root;
  while (at != rank_ && at != 0) {
    next = at;
    at = place_in_tree(at, size_).parent;
  }
  if (at != rank_) return {};
  if (rank_ != 0) message = links_.take(links_.place().parent);
  if (next < 0) return message;
  links_.give(next, std::make_shared<const Bytes>(std::move(message)));
  links_.finish();
  return {};
}

Bytes TreeGroup::to_first(int root, const std::string& called, const Bytes& message) {
  if (root == 0) return message;
  return up(called, rank_ == root ? message : Bytes(), filled);
}

Bytes TreeGroup::scatter(const std::vector<Bytes>& messages, int root) {
  require_rank(root);
  Bytes mine;
  if (rank_ == root) {
    append_le(mine, static_cast<std::uint64_t>(messages.size()));
    if (messages.size() == static_cast<std::size_t>(size_))
      for (const Bytes& message : messages) append_listed(mine, message);
  }
  std::uint64_t given = 0;
  Bytes own = collective("scatter with " + named(root), [&](const std::string& called) {
    Bytes all = to_first(root, called, mine);
    links_.begin(called);
    if (rank_ != 0) all = links_.take(links_.place().parent);
    std::span<const std::byte> list(all);
    given = take_number(list);
    std::vector<Bytes> below = messages_of(list);
    pass_on(Bytes(all.begin(), all.begin() + sizeof given), below);
    links_.finish();
    return below.empty() ? Bytes() : std::move(below.front());
  });
  // Judged after the exchange, so that every rank gets the error and nobody waits.
  if (given != static_cast<std::uint64_t>(size_)) {
    throw Error(ErrorCode::invalid_argument, std::to_string(given) + " messages to scatter to " +
                                                 std::to_string(size_) + " ranks");
  }
  return own;
}

// To each child those of its subtree. `messages` begins with this rank's own.
void TreeGroup::pass_on(const Bytes& count, const std::vector<Bytes>& messages) {
  const std::vector<int>& children = links_.place().children;
  const int end = rank_ + static_cast<int>(messages.size());
  for (std::size_t i = 0; i < children.size(); ++i) {
    Bytes theirs = count;
    const int next = i + 1 < children.size() ? children[i + 1] : end;
    for (int to = children[i]; to < next && !messages.empty(); ++to)
      append_listed(theirs, messages[static_cast<std::size_t>(to - rank_)]);
    links_.give(children[i], std::make_shared<const Bytes>(std::move(theirs)));
  }
}

void TreeGroup::connect_all(std::chrono::milliseconds deadline, const Connect& connect) {
  const auto end = std::chrono::steady_clock::now() + deadline;
  std::vector<int> missing = links_.place().children;
  if (rank_ != 0) missing.insert(missing.begin(), links_.place().parent);
  std::chrono::milliseconds pause(1);
  try {
    while (true) {
      std::erase_if(missing, [&](int peer) {
        std::unique_ptr<Wire> wire = connect(peer);
        if (!wire) return false;
        links_.add(peer, std::move(wire));
        return true;
      });
      if (missing.empty()) return;
      links_.require_whole();
      if (std::chrono::steady_clock::now() > end) {
        throw Error(ErrorCode::timeout, "rank " + std::to_string(missing.front()) +
                                            " has not come within " +
                                            std::to_string(deadline.count()) + " ms");
      }
      std::this_thread::sleep_for(pause);
      pause = std::min(pause * 2, std::chrono::milliseconds(200));
    }
  } catch (...) {
    fail();
  }
}

}  // namespace

std::unique_ptr<Group> make_tree_group(int rank, int size, const TreeOptions& options,
                                       std::chrono::milliseconds deadline, const Connect& connect) {
  auto group = std::make_unique<TreeGroup>(rank, size, options);
  group->connect_all(deadline, connect);
  group->barrier();
  return group;
}

}  // namespace tessera
