#include "tessera/grace.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <tuple>
#include <utility>

#include <fmt/format.h>

#include "base/log.h"
#include "base/process.h"
#include "base/signals.h"
#include "comm/confer.h"
#include "comm/message.h"
#include "comm/whereabouts.h"
#include "tessera/error.h"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::nanoseconds;

// What ranks tell each other behind a step: of all of them the worst.
struct WorstEnd {
  std::optional<int> asker = {};            // the lowest rank that is to end; none: no rank is
  std::int64_t left = 0;                    // nanoseconds, on the one of them that has the least
  std::optional<std::int64_t> needed = {};  // nanoseconds until a save has ended; none: not known
};
auto fields(FieldsOf<WorstEnd> auto& end) {
  return std::tie(end.asker, end.left, end.needed);
}

void join(WorstEnd& all, const WorstEnd& more) {
  if (more.asker) all.left = all.asker ? std::min(all.left, more.left) : more.left;
  if (!all.asker) all.asker = more.asker;
  if (more.needed) all.needed = std::max(all.needed.value_or(0), *more.needed);
}

double in_seconds(std::int64_t time) {
  return std::chrono::duration<double>(nanoseconds(time)).count();
}

constexpr std::chrono::milliseconds kMostTime = std::chrono::hours(24 * 365);

const GraceOptions& require_meant(const GraceOptions& options) {
  if (options.time.count() > 0) return options;
  throw Error(
      ErrorCode::invalid_argument,
      fmt::format("GraceOptions::time is {} ms, expected more than 0", options.time.count()));
}

}  // namespace

class Grace::Wish {
 public:
  explicit Wish(const GraceOptions& options) : time_(std::min(options.time, kMostTime)) {
    for (const int signal : options.signals) signals_.emplace_back(signal);
  }
  ~Wish() {
    if (!made_here_) static_cast<void>(timer_.release());  // there is no such thread in a child
  }
  Wish(const Wish&) = delete;
  Wish& operator=(const Wish&) = delete;

  bool ends(Group& group) {
    if (agreed_) return true;
    const auto worst = agree(group);
    if (!worst.asker) return false;
    agreed_ = worst;
    fits_ = worst.needed ? *worst.needed <= worst.left : worst.left > 0;
    say();
    stop_in_time();
    return true;
  }
  void ask() noexcept {
    std::int64_t never = 0;
    asked_.compare_exchange_strong(never, Clock::now().time_since_epoch().count());
  }
  [[nodiscard]] bool fits() const noexcept { return fits_; }
  [[nodiscard]] std::stop_token stop() const noexcept { return stop_.get_token(); }

  void note_save(nanoseconds took) {
    constexpr std::size_t kSaves = 4;
    saves_.push_back(took);
    if (saves_.size() > kSaves) saves_.pop_front();
  }
  void began(PendingSave save) {
    note_pending();
    pending_ = std::move(save);
    begun_ = Clock::now();
  }

 private:
  WorstEnd agree(Group& group) {
    const Purpose purpose("asking whether the run is to end");
    const auto conference = conference_of([&] { return own(group.rank()); }, join,
                                          [](const WorstEnd& all) { return all; });
    return from_message<WorstEnd>(confer(group, "asking whether the run is to end", conference));
  }

  // What the one in the background took, if it is decided.
  void note_pending() {
    if (!pending_ || !pending_->done()) return;
    if (!pending_->failed()) note_save(Clock::now() - begun_);
    pending_.reset();
  }

  WorstEnd own(int rank) {
    note_pending();
    WorstEnd end;
    if (const auto since = came()) {
      end.asker = rank;
      end.left = nanoseconds(*since + time_ - Clock::now()).count();
    }
    if (saves_.empty()) return end;
    const nanoseconds longest = *std::ranges::max_element(saves_);
    const nanoseconds before =
        pending_ ? std::max(nanoseconds(0), longest - (Clock::now() - begun_)) : nanoseconds(0);
    end.needed = (before + longest).count();
    return end;
  }

  [[nodiscard]] std::optional<Clock::time_point> came() const {
    std::optional<Clock::time_point> first;
    const auto take = [&first](Clock::time_point at) { first = std::min(first.value_or(at), at); };
    for (const auto& signal : signals_)
      if (const auto at = signal.came()) take(*at);
    if (const std::int64_t asked = asked_; asked != 0) take(Clock::time_point(nanoseconds(asked)));
    return first;
  }

  void say() const {
    const std::string needed =
        agreed_->needed ? fmt::format("a save takes {:.1f} s", in_seconds(*agreed_->needed))
                        : "how long a save takes is not known";
    log_of_all(LogLevel::warning,
               fmt::format("rank {} is told to end, so the run ends behind this step: {:.1f} s are "
                           "left, {}: {}",
                           *agreed_->asker, in_seconds(agreed_->left), needed,
                           fits_ ? "there is time for one more"
                                 : "none begins, and the newest checkpoint stands"));
  }

  // Before the time is over, since what is stopped takes a moment to end.
  void stop_in_time() {
    constexpr nanoseconds kMost = std::chrono::seconds(2);
    const nanoseconds left(agreed_->left);
    const auto until = Clock::now() + left - std::min(left / 10, kMost);
    try {
      timer_ = std::make_unique<std::jthread>([this, until](const std::stop_token& end) {
        std::mutex mutex;
        std::condition_variable_any ended;
        std::unique_lock lock(mutex);
        if (!ended.wait_until(lock, end, until, [] { return false; }) && !end.stop_requested())
          stop_.request_stop();
      });
    } catch (const std::system_error& error) {
      log(LogLevel::warning,
          std::string("no save is stopped when the time is over: ") + error.what());
    }
  }

  const nanoseconds time_;
  std::deque<NotedSignal> signals_;
  std::atomic<std::int64_t> asked_{0};  // of steady_clock; 0: never
  std::deque<nanoseconds> saves_;       // the last ones
  std::optional<PendingSave> pending_;
  Clock::time_point begun_;         // of pending_
  std::optional<WorstEnd> agreed_;  // none: the run goes on
  bool fits_ = false;
  std::stop_source stop_;
  const MadeHere made_here_;
  std::unique_ptr<std::jthread> timer_;  // ends first
};

Grace::Grace(Group& group, const GraceOptions& options)
    : group_(group), wish_(std::make_unique<Wish>(require_meant(options))) {}

Grace::Grace(const GraceOptions& options)
    : alone_(solo_group()),
      group_(*alone_),
      wish_(std::make_unique<Wish>(require_meant(options))) {}

Grace::~Grace() = default;

bool Grace::ends() {
  return wish_->ends(group_);
}

void Grace::ask() noexcept {
  wish_->ask();
}

bool Grace::leaves_time_to_save() const noexcept {
  return wish_->fits();
}

std::stop_token Grace::stop() const noexcept {
  return wish_->stop();
}

void Grace::note_save(std::chrono::nanoseconds took) {
  wish_->note_save(took);
}

void Grace::began(PendingSave save) {
  wish_->began(std::move(save));
}

}  // namespace tessera
