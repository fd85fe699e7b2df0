// The lease of a run, as an object for each job that has it.
//   1. Whoever wants the run reads the highest object, and watches it if its job may live.
//   2. He makes the next one, which only one can: who has the run is decided there.
//   3. He writes it again and again. A job that finds a higher one than its own has lost the run.
#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/log.h"
#include "base/parallel.h"
#include "base/process.h"
#include "base/text.h"
#include "checkpoint/open/located.h"
#include "comm/confer.h"
#include "comm/long_work.h"
#include "comm/message.h"
#include "comm/segment.h"
#include "io/source.h"
#include "storage/storage.h"
#include "tessera/error.h"
#include "tessera/run_lease.h"
#include "tessera/storage.h"
#include "value/render.h"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr std::string_view kLeaseStart = "tessera-lease-";
constexpr std::string_view kLeaseEnd = ".txt";
constexpr std::string_view kLeaseLine = "a job of tessera";
constexpr int kSigns = 6;  // of life, in the time of a lease

std::string lease_name(std::uint64_t number) {
  return std::string(kLeaseStart) + std::to_string(number) + std::string(kLeaseEnd);
}

// What a job says of itself. Its lines are "KEY VALUE".
struct LeaseText {
  bool is_free = false;
  milliseconds expires{0};
  std::string process;  // as to_text() of comm/segment.h says it; empty: not known
  std::string host;
  std::uint64_t signs = 0;

  [[nodiscard]] std::string text() const {
    return fmt::format("{}\nstate {}\nexpires {} ms\nprocess {}\nhost {}\nsigns {}\n", kLeaseLine,
                       is_free ? "free" : "held", expires.count(), process, host, signs);
  }
};

// Throws `corrupt` for what text() has not written.
LeaseText lease_from_text(std::string_view text) {
  const auto line = [&text](std::string_view key) {
    const std::size_t end = text.find('\n');
    if (end == std::string_view::npos || !text.starts_with(key))
      throw Error(ErrorCode::corrupt, "the lease of a run that no job of tessera has written");
    const std::string value(text.substr(key.size(), end - key.size()));
    text.remove_prefix(end + 1);
    return value;
  };
  const auto number = [](std::string_view digits) {
    const auto value = plain_number(digits);
    if (value) return static_cast<std::uint64_t>(*value);
    throw Error(ErrorCode::corrupt, "the lease of a run has no number where it should");
  };
  LeaseText lease;
  (void)line(kLeaseLine);
  lease.is_free = line("state ") == "free";
  std::string expires = line("expires ");
  expires.resize(expires.size() - std::min(expires.size(), std::string_view(" ms").size()));
  constexpr std::uint64_t kMost = 1'000'000'000;  // twelve days: what waits for it would never end
  lease.expires = milliseconds(std::min(number(expires), kMost));
  lease.process = line("process ");
  lease.host = line("host ");
  lease.signs = number(line("signs "));
  return lease;
}

// The object with the highest number.
struct HighestLease {
  std::uint64_t number = 0;  // 0: there is none
  std::string text;
  LeaseText lease;
};

std::vector<std::uint64_t> numbers_in(const Store& run) {
  std::vector<std::uint64_t> numbers;
  for (const ObjectInfo& object : run.list_level()) {
    std::string_view name = object.name;
    if (!name.starts_with(kLeaseStart) || !name.ends_with(kLeaseEnd)) continue;
    name.remove_prefix(kLeaseStart.size());
    name.remove_suffix(kLeaseEnd.size());
    if (const auto number = plain_number(name)) numbers.push_back(*number);
  }
  return numbers;
}

HighestLease highest_in(const Store& run) {
  constexpr std::uint64_t kMostBytes = 4096;
  HighestLease highest;
  const auto look = [&] {
    const auto numbers = numbers_in(run);
    highest = {.number = numbers.empty() ? 0 : *std::ranges::max_element(numbers)};
    if (highest.number == 0) return true;
    try {
      highest.text = to_text(read_all(*run.open(lease_name(highest.number)), kMostBytes));
    } catch (const Error& error) {
      if (error.code() == ErrorCode::not_found) return false;  // a higher one takes its place
      throw;
    }
    return true;
  };
  const auto path = [&] { return run.name() + "/" + lease_name(highest.number); };
  if (!look_again(look))
    throw Error(ErrorCode::io, "is listed, and cannot be opened").at_path(path());
  try {
    if (highest.number > 0) highest.lease = lease_from_text(highest.text);
  } catch (Error& error) {
    throw error.at_path(path());
  }
  return highest;
}

// Whether its process runs; none: that is on another host, or the kernel does not tell.
std::optional<bool> is_alive(const LeaseText& lease) {
  std::optional<bool> alive;
  try {
    const auto process = same_host::process_from_text(lease.process);
    if (process.host == same_host::this_process().host) alive = same_host::Watch(process).alive();
  } catch (const Error& error) {
    if (error.code() == ErrorCode::peer_failed) alive = false;
  }
  return alive;
}

[[noreturn]] void throw_taken(const HighestLease& other, const char* how) {
  throw Error(ErrorCode::conflict, fmt::format("another job, on host {}, goes on with this run: {}",
                                               printable(other.lease.host), how))
      .at_path(lease_name(other.number));
}

// The number of the lease that may be made now.
std::uint64_t free_number(const Store& run, const std::stop_token& stop) {
  HighestLease seen = highest_in(run);
  if (seen.number == 0 || seen.lease.is_free) return seen.number + 1;
  const auto alive = is_alive(seen.lease);
  if (alive == false) return seen.number + 1;
  if (alive == true) throw_taken(seen, "its process runs");
  log(LogLevel::info,
      fmt::format("waiting for {:.1f} s at most to see whether the job that has the run lives, on "
                  "host {}",
                  std::chrono::duration<double>(seen.lease.expires).count(),
                  printable(seen.lease.host)));
  const auto until = Clock::now() + seen.lease.expires;
  const auto between = std::max(milliseconds(20), seen.lease.expires / (4 * kSigns));
  while (Clock::now() < until) {
    require_going_on(stop);
    std::this_thread::sleep_for(std::min(between, milliseconds(500)));
    const HighestLease now = highest_in(run);
    if (now.number == seen.number && now.lease.is_free) break;
    if (now.number != seen.number || now.text != seen.text)
      throw_taken(now, "it gave a sign of life");
  }
  return seen.number + 1;
}

const LeaseOptions& require_meant(const LeaseOptions& options) {
  if (options.expires >= std::chrono::seconds(1)) return options;
  throw Error(ErrorCode::invalid_argument,
              fmt::format("LeaseOptions::expires is {} ms, expected 1000 or more",
                          options.expires.count()));
}

}  // namespace

// Of the process that has the run.
class RunLease::Held {
 public:
  Held(const Location& where, const LeaseOptions& options, const std::stop_token& stop)
      : run_(directory_store(where)), expires_(options.expires) {
    number_ = free_number(*run_, stop);
    own_ = {.expires = expires_, .host = host_name()};
    (void)failure_of([&] { own_.process = same_host::to_text(same_host::this_process()); });
    last_sign_ = Clock::now();
    try {
      write_own(IfExists::fail);
    } catch (const Error& error) {
      if (error.code() == ErrorCode::already_exists || error.code() == ErrorCode::conflict)
        throw_taken(highest_in(*run_), "it came first");
      throw;
    }
    for (const std::uint64_t older : numbers_in(*run_))
      if (older < number_) run_->remove(lease_name(older));
    try {
      thread_ = std::make_unique<std::jthread>([this](const std::stop_token& end) { keep(end); });
    } catch (const std::system_error& error) {
      free();
      throw Error(ErrorCode::io, std::string("no thread for the lease of a run: ") + error.what());
    }
  }
  ~Held() {
    if (!made_here_) {
      static_cast<void>(thread_.release());  // there is no such thread in the child
      return;
    }
    thread_.reset();
    if (!lost_.stop_requested()) free();
  }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;

  [[nodiscard]] std::uint64_t number() const noexcept { return number_; }
  [[nodiscard]] std::stop_token lost() const noexcept { return lost_.get_token(); }

  void require_held() {
    if (!made_here_) {
      throw Error(ErrorCode::invalid_argument,
                  "this process was forked after its RunLease was made, which is its parent's");
    }
    if (!lost_.stop_requested()) look();
    if (!lost_.stop_requested()) return;
    const std::lock_guard lock(mutex_);
    throw Error(ErrorCode::conflict, "the run is not this job's any more: " + why_)
        .at_path(run_->name());
  }

 private:
  void write_own(IfExists if_exists) {
    const std::string text = own_.text();
    put(*run_, lease_name(number_), std::as_bytes(std::span(text)), if_exists);
  }
  void free() {
    (void)failure_of([&] {
      if (has_successor()) return;
      own_.is_free = true;
      write_own(IfExists::replace);
    });
  }
  // Nobody removes the highest one but by hand.
  [[nodiscard]] bool has_successor() const {
    const auto numbers = numbers_in(*run_);
    return numbers.empty() || *std::ranges::max_element(numbers) != number_;
  }

  void lose(std::string why) {
    {
      const std::lock_guard lock(mutex_);
      if (lost_.stop_requested()) return;
      why_ = std::move(why);
    }
    log(LogLevel::warning, "the run " + run_->name() + " is not this job's any more: " + why_);
    lost_.request_stop();
  }
  // Whether the run is still this job's, as the store and the time say.
  void look() {
    bool has_other = false;
    const auto failure = failure_of([&] { has_other = has_successor(); });
    if (has_other) lose("another one has taken it");
    const std::lock_guard lock(looking_);
    if (!has_other && Clock::now() - last_sign_ > expires_ * 2 / 3)
      lose("the store has taken no sign of life for too long" +
           (failure ? std::string(": ") + failure->what() : ""));
  }
  void give_sign() {
    const auto now = Clock::now();
    const auto failure = failure_of([&] {
      ++own_.signs;
      write_own(IfExists::replace);
    });
    if (failure) {
      log(LogLevel::warning,
          std::string("a sign of life for the lease of a run: ") + failure->what());
      return;
    }
    const std::lock_guard lock(looking_);
    last_sign_ = now;
  }
  void keep(const std::stop_token& end) {
    std::mutex mutex;
    std::condition_variable_any ended;
    std::unique_lock lock(mutex);
    while (!lost_.stop_requested()) {
      (void)ended.wait_for(lock, end, expires_ / kSigns, [] { return false; });
      if (end.stop_requested()) return;
      look();
      if (!lost_.stop_requested()) give_sign();
    }
    (void)failure_of([&] {
      if (has_successor()) run_->remove(lease_name(number_));
    });
  }

  const MadeHere made_here_;
  const std::shared_ptr<Store> run_;
  const milliseconds expires_;
  std::uint64_t number_ = 0;
  LeaseText own_;  // once the thread runs, the thread's
  std::mutex looking_;
  Clock::time_point last_sign_;  // that the store took; guarded by looking_
  std::mutex mutex_;
  std::string why_;  // it is lost; guarded by mutex_
  std::stop_source lost_;
  std::unique_ptr<std::jthread> thread_;  // ends first
};

RunLease::RunLease(const Location& run, const LeaseOptions& options)
    : alone_(solo_group()),
      group_(*alone_),
      held_(std::make_unique<Held>(run, require_meant(options), options.stop)),
      number_(held_->number()) {}

RunLease::RunLease(const Location& run, Group& group, const LeaseOptions& options) : group_(group) {
  const auto take = [&](const std::stop_token& stop) {
    (void)require_meant(options);
    if (group.rank() == 0) held_ = std::make_unique<Held>(run, options, stop);
  };
  const auto number = [&]() -> std::uint64_t { return held_ ? held_->number() : 0; };
  const auto join = [](std::uint64_t& all, std::uint64_t more) { all = std::max(all, more); };
  const auto conference = conference_of(number, join, [](std::uint64_t all) { return all; });
  number_ = from_message<std::uint64_t>(
      confer_after_long_work(group, options.stop, take, "taking the lease of a run", conference));
}

RunLease::~RunLease() = default;

std::uint64_t RunLease::number() const noexcept {
  return number_;
}

void RunLease::require_held() {
  agree(group_, "asking whether the run is still this job's", [this] {
    if (held_) held_->require_held();
  });
}

std::stop_token RunLease::lost() const noexcept {
  return held_ ? held_->lost() : never_.get_token();
}

}  // namespace tessera
