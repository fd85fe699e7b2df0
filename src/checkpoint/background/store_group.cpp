#include "checkpoint/background/store_group.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <map>
#include <mutex>
#include <optional>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/log.h"
#include "checkpoint/background/channel.h"
#include "checkpoint/open/under_way.h"
#include "comm/confer.h"
#include "comm/message.h"
#include "comm/tree_links.h"
#include "comm/whereabouts.h"
#include "io/source.h"
#include "storage/storage.h"
#include "tessera/error.h"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr std::chrono::hours kLongestWait{1};
constexpr milliseconds kMostUntilInterrupted{1000};
constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 32U;  // of a message

class StoreGroup final : public Group {
 public:
  StoreGroup(std::shared_ptr<Store> meeting, int rank, int size, milliseconds silence)
      : meeting_(std::move(meeting)),
        rank_(rank),
        size_(size),
        silence_(silence),
        poll_(meeting_->has_directories() ? milliseconds(5) : milliseconds(300)),
        place_(place_in_tree(rank, size)) {
    put_object(here_, {});
    pulse_ = std::jthread([this](const std::stop_token& stop) { give_signs(stop); });
  }

  ~StoreGroup() override { end_threads(); }

  [[nodiscard]] int rank() const noexcept override { return rank_; }
  [[nodiscard]] int size() const noexcept override { return size_; }

  Bytes fold(Bytes mine, const Combine& combine) override {
    const std::string called = with_purpose("fold");
    ++folds_;
    std::vector<Bytes> all{std::move(mine)};
    for (const int child : place_.children) {
      const Bytes told = take(message_name("up", folds_, child), child);
      MessageReader message(told);
      if (const std::string theirs = message.text(); theirs != called)
        fail(different_calls(rank_, called, child, theirs));
      all.emplace_back(message.rest().begin(), message.rest().end());
    }
    Bytes combined = std::move(all.front());
    for (std::size_t i = 1; i < all.size(); ++i)
      combined = combine(std::move(combined), std::move(all[i]));
    reset_interrupt();
    if (rank_ == 0) return combined;
    put_object(message_name("up", folds_, rank_),
               MessageWriter().text(called).rest(combined).take());
    return {};
  }

  Bytes spread(Bytes message) override {
    ++spreads_;
    const std::string name = message_name("down", spreads_, 0);
    if (rank_ != 0) return take(name, 0);
    put_object(name, message);
    return message;
  }

  void barrier() override { (void)all_gather({}); }
  std::vector<Bytes> gather(const Bytes& mine, int root) override {
    require_rank(root);
    std::vector<Bytes> all = all_gather(mine);
    return rank_ == root ? std::move(all) : std::vector<Bytes>();
  }
  std::vector<Bytes> all_gather(const Bytes& mine) override {
    return from_message<std::vector<Bytes>>(spread(folded({mine})));
  }
  Bytes broadcast(const Bytes& message, int root) override {
    require_rank(root);
    if (root == 0) return spread(message);
    return all_gather(rank_ == root ? message : Bytes()).at(static_cast<std::size_t>(root));
  }
  Bytes scatter(const std::vector<Bytes>& messages, int root) override {
    const Bytes all = broadcast(rank_ == root ? to_message(messages) : Bytes(), root);
    auto parts = from_message<std::vector<Bytes>>(all);
    if (parts.size() == static_cast<std::size_t>(size_))
      return std::move(parts[static_cast<std::size_t>(rank_)]);
    throw Error(ErrorCode::invalid_argument, std::to_string(parts.size()) +
                                                 " messages to scatter to " +
                                                 std::to_string(size_) + " ranks");
  }

  [[nodiscard]] bool carries_interrupts() const noexcept override { return true; }
  void interrupt() override {
    (void)failure_of([&] { put_object(message_name("interrupt", folds_, 0), {}); });
  }
  // A thread looks whether somebody has, until the next fold.
  [[nodiscard]] std::stop_token interrupted() override {
    const std::lock_guard lock(mutex_);
    if (!watcher_.joinable()) {
      interrupt_ = {};
      watcher_ =
          std::jthread([this, source = interrupt_, name = message_name("interrupt", folds_, 0)](
                           const std::stop_token& stop) mutable {
            while (!stop.stop_requested()) {
              if (is_there(name) || is_there(kMeetingBroken)) source.request_stop();
              nap(stop, std::min(20 * poll_, kMostUntilInterrupted));
            }
          });
    }
    return interrupt_.get_token();
  }
  void require_peers() override { require_whole(); }

  // What a rank wrote others may still have to read, the failure of all as well. So rank 0 waits
  // for each to end, and removes what is there if all have. Whoever does not is not waited for
  // longer than `silence`; then what is there stays.
  void end() noexcept {
    end_threads();  // signs of life that come later would stay
    (void)failure_of([this] {
      if (rank_ != 0) return put_object(message_name("end", 0, rank_), {});
      Silence silence(silence_);
      for (int other = 1; other < size_; ++other) {
        while (!is_there(message_name("end", 0, other))) {
          if (silence.is_over()) return;
          std::this_thread::sleep_for(poll_);
        }
      }
      for (const ObjectInfo& object : meeting_->list()) {
        if (object.name != kMeetingTrainer) meeting_->remove(object.name);
      }
    });
  }

 private:
  void end_threads() noexcept {
    if (watcher_.joinable()) watcher_.request_stop();
    pulse_.request_stop();
    if (pulse_.joinable()) pulse_.join();
  }

  void require_rank(int root) const {
    if (root >= 0 && root < size_) return;
    throw Error(ErrorCode::invalid_argument,
                "root is rank " + std::to_string(root) + " of " + std::to_string(size_));
  }

  Bytes folded(const std::vector<Bytes>& mine) {
    return fold(to_message(mine), [](const Bytes& left, const Bytes& right) {
      auto all = from_message<std::vector<Bytes>>(left);
      for (Bytes& one : from_message<std::vector<Bytes>>(right)) all.push_back(std::move(one));
      return to_message(all);
    });
  }

  static std::string message_name(const char* what, std::uint64_t number, int rank) {
    return what + ("-" + std::to_string(number)) + "-" + std::to_string(rank);
  }

  void put_object(const std::string& name, ByteView bytes) const {
    put(*meeting_, name, bytes, IfExists::replace);
  }
  [[nodiscard]] bool is_there(const std::string& name) const noexcept {
    bool is_there = false;
    (void)failure_of([&] { is_there = meeting_->exists(name); });
    return is_there;
  }
  // Null also for what is replaced while it is read, as signs of life are: the next look has it.
  [[nodiscard]] std::optional<Bytes> look(const std::string& name) const {
    std::optional<Bytes> found;
    const auto failure = failure_of([&] {
      if (const auto source = open_if_there(*meeting_, name)) found = read_all(*source, kMostBytes);
    });
    if (failure && failure->code() != ErrorCode::conflict) throw Error(*failure);
    return found;
  }

  void nap(const std::stop_token& stop, milliseconds time) const {
    std::mutex mutex;
    std::unique_lock lock(mutex);
    std::condition_variable_any none;
    none.wait_for(lock, stop, time, [] { return false; });
  }

  void give_signs(const std::stop_token& stop) {
    for (std::uint64_t beat = 1; !stop.stop_requested(); ++beat) {
      (void)failure_of([&] { put_object(sign_name(rank_), to_message(beat)); });
      nap(stop, std::max(silence_ / 4, milliseconds(1)));
    }
  }
  static std::string sign_name(int rank) { return message_name("alive", 0, rank); }

  void require_whole() {
    if (!broken_) {
      if (const auto failure = look(kMeetingBroken)) broken_ = decode_error(*failure);
    }
    if (broken_) throw *broken_;
  }
  [[noreturn]] void fail(const Error& failure) {
    if (!broken_) {
      (void)failure_of([&] { put_object(kMeetingBroken, encode_error(failure)); });
      broken_ = failure;
    }
    throw *broken_;
  }

  // Signs of life are written again and again, messages once: nobody would notice that these are
  // gone.
  void require_meeting() {
    if (meeting_->exists(here_)) return;
    fail(Error(ErrorCode::conflict, "the directory in which writer processes met was deleted")
             .at_path(meeting_->name()));
  }

  // The object that rank `from` writes.
  Bytes take(const std::string& name, int from) {
    const auto begin = Clock::now();
    Silence silence(silence_);
    std::optional<Bytes> sign;
    for (milliseconds wait = poll_ / 5;; wait = std::min(2 * wait, 10 * poll_)) {
      if (auto bytes = look(name)) return *std::move(bytes);
      require_whole();
      require_meeting();
      if (Clock::now() - begin >= kLongestWait) {
        fail(Error(ErrorCode::timeout, "the writer process of rank " + std::to_string(from) +
                                           " lives, and has said nothing for an hour"));
      }
      if (auto now = look(sign_name(from)); now != sign) {
        sign = std::move(now);
        silence.heard();
      } else if (silence.is_over()) {
        fail(Error(ErrorCode::peer_failed, "the writer process of rank " + std::to_string(from) +
                                               (sign ? " gives no sign of life" : " has not come") +
                                               " for " + std::to_string(silence_.count()) + " ms"));
      }
      std::this_thread::sleep_for(std::max(wait, milliseconds(1)));
    }
  }

  void reset_interrupt() {
    const std::lock_guard lock(mutex_);
    if (!watcher_.joinable()) return;
    watcher_.request_stop();
    watcher_.join();
  }

  const std::shared_ptr<Store> meeting_;
  const int rank_, size_;
  const milliseconds silence_, poll_;
  const TreePlace place_;
  const std::string here_ = message_name("here", 0, rank_);  // once it is written it stays
  std::atomic<std::uint64_t> folds_ = 0;
  std::uint64_t spreads_ = 0;
  std::optional<Error> broken_;
  std::mutex mutex_;  // guards the two that follow
  std::stop_source interrupt_;
  std::jthread watcher_;
  std::jthread pulse_;
};

}  // namespace

std::unique_ptr<Group> make_store_group(std::shared_ptr<Store> meeting, int rank, int size,
                                        std::chrono::milliseconds silence) {
  return std::make_unique<StoreGroup>(std::move(meeting), rank, size, silence);
}

bool has_met(const Store& meeting) noexcept {
  bool has_met = false;
  (void)failure_of([&] {
    has_met = std::ranges::any_of(meeting.list_level(), [](const ObjectInfo& object) {
      return object.name.starts_with("here-");
    });
  });
  return has_met;
}

void end_meeting(std::unique_ptr<Group> group) noexcept {
  static_cast<StoreGroup&>(*group).end();
}

}  // namespace tessera
