// The lease of a run, as an object for each job that has it.
//   1. Whoever wants the run reads the highest object, and watches it if its job may live.
//   2. He makes the next one, which only one can: who has the run is decided there.
//   3. He writes it again and again. A job that finds another one than its own has lost the run.
//   4. He removes it in the end.
#include <algorithm>
#include <charconv>
#include <condition_variable>
#include <cstddef>
#include <filesystem>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/host_process.h"
#include "base/log.h"
#include "base/parallel.h"
#include "base/process.h"
#include "checkpoint/open/located.h"
#include "checkpoint/open/under_way.h"
#include "checkpoint/run/kept_checkpoint.h"
#include "comm/confer.h"
#include "comm/long_work.h"
#include "comm/message.h"
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
constexpr milliseconds kMostExpires = std::chrono::hours(24);

std::string lease_name(std::uint64_t number) {
  return std::string(kLeaseStart) + std::to_string(number) + std::string(kLeaseEnd);
}

// Plain digits; none: anything else, or more than 64 bits.
std::optional<std::uint64_t> number_in(std::string_view digits) {
  std::uint64_t number = 0;
  const auto [end, failed] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  const bool is_plain = failed == std::errc() && end == digits.data() + digits.size() &&
                        (digits.size() == 1 || !digits.starts_with('0'));
  return is_plain ? std::optional(number) : std::nullopt;
}

// What a job says of itself. Its lines are "KEY VALUE".
struct LeaseText {
  milliseconds expires{0};
  std::string process = {};  // as to_text() of base/host_process.h says it; empty: not known
  std::string id = {};       // of the lease: a process that has become another program has none
  std::string host = {};
  std::uint64_t signs = 0;

  [[nodiscard]] std::string text() const {
    return fmt::format("{}\nexpires {} ms\nprocess {}\nid {}\nhost {}\nsigns {}\n", kLeaseLine,
                       expires.count(), process, id, host, signs);
  }
};

[[noreturn]] void throw_no_lease() {
  throw Error(ErrorCode::corrupt,
              "the lease of a run that no job of tessera has written; removed by hand, it is free");
}

// Throws `corrupt` for what text() has not written.
LeaseText lease_from_text(std::string_view text) {
  const auto line = [&text](std::string_view key) {
    const std::size_t end = text.find('\n');
    if (end == std::string_view::npos || !text.starts_with(key)) throw_no_lease();
    const std::string_view value = text.substr(key.size(), end - key.size());
    text.remove_prefix(end + 1);
    return value;
  };
  const auto number = [](std::string_view digits) {
    const auto value = number_in(digits);
    if (!value) throw_no_lease();
    return *value;
  };
  LeaseText lease;
  if (!line(kLeaseLine).empty()) throw_no_lease();
  std::string_view expires = line("expires ");
  if (!expires.ends_with(" ms")) throw_no_lease();
  expires.remove_suffix(3);
  // Whoever waits for more would wait for ever.
  const auto most = static_cast<std::uint64_t>(kMostExpires.count());
  lease.expires = milliseconds(std::min(number(expires), most));
  lease.process = line("process ");
  lease.id = line("id ");
  lease.host = line("host ");
  lease.signs = number(line("signs "));
  if (!text.empty()) throw_no_lease();
  return lease;
}

// The object with the highest number.
struct HighestLease {
  std::uint64_t number = 0;  // 0: there is none
  std::string text = {};
  LeaseText lease = {};
};

std::vector<std::uint64_t> numbers_in(const Store& run) {
  std::vector<std::uint64_t> numbers;
  for (const ObjectInfo& object : run.list_level()) {
    std::string_view name = object.name;
    if (!name.starts_with(kLeaseStart) || !name.ends_with(kLeaseEnd)) continue;
    name.remove_prefix(kLeaseStart.size());
    name.remove_suffix(kLeaseEnd.size());
    if (const auto number = number_in(name)) numbers.push_back(*number);
  }
  return numbers;
}

std::string lease_text(const ByteSource& source) {
  constexpr std::uint64_t kMostBytes = 4096;
  if (source.size() > kMostBytes) throw_no_lease();
  return to_text(read_all(source, kMostBytes));
}

HighestLease highest_in(const Store& run) {
  HighestLease highest;
  const auto look = [&] {
    const auto numbers = numbers_in(run);
    highest = {.number = numbers.empty() ? 0 : *std::ranges::max_element(numbers)};
    if (highest.number == 0) return true;
    try {
      highest.text = lease_text(*run.open(lease_name(highest.number)));
      highest.lease = lease_from_text(highest.text);
    } catch (const Error& error) {
      if (error.code() == ErrorCode::not_found) return false;  // a higher one takes its place
      throw;
    }
    return true;
  };
  try {
    if (!look_again(look)) throw_no_lease();
  } catch (Error& error) {
    throw error.at_path(run.name() + "/" + lease_name(highest.number));
  }
  return highest;
}

// The leases that this process has, by their ids.
struct OwnLeases {
  ShortMutex mutex;
  std::set<std::string> ids;  // guarded by mutex
};
OwnLeases& own_leases = *new OwnLeases;

// Whether its process runs and has it; none: nobody can tell.
std::optional<bool> is_alive(const LeaseText& lease) {
  try {
    const auto process = same_host::process_from_text(lease.process);
    if (process != same_host::this_process()) return same_host::is_alive(process);
  } catch (const Error&) {
    return std::nullopt;
  }
  const std::lock_guard lock(own_leases.mutex);
  return own_leases.ids.contains(lease.id);
}

[[noreturn]] void throw_taken(const HighestLease& other, const char* how) {
  throw Error(ErrorCode::conflict, fmt::format("another job, on host {}, goes on with this run: {}",
                                               printable(other.lease.host), how))
      .at_path(lease_name(other.number));
}

// The number of the lease that the next one may follow, since its job is dead; 0: there is none.
std::uint64_t free_behind(const Store& run, const std::stop_token& stop) {
  const HighestLease seen = highest_in(run);
  if (seen.number == 0) return 0;
  if (seen.number == std::numeric_limits<std::uint64_t>::max()) throw_no_lease();
  const auto alive = is_alive(seen.lease);
  if (alive == false) return seen.number;
  if (alive == true) throw_taken(seen, "its process runs");
  log(LogLevel::info,
      fmt::format("waiting for {:.1f} s at most to see whether the job that has the run lives, on "
                  "host {}",
                  std::chrono::duration<double>(seen.lease.expires).count(),
                  printable(seen.lease.host)));
  const auto until = Clock::now() + seen.lease.expires;
  const auto between = std::max(milliseconds(20), seen.lease.expires / (4 * kSigns));
  // The last look begins when the time is over: one that began before may have taken long.
  for (auto begun = Clock::now(); begun < until;) {
    require_going_on(stop);
    std::this_thread::sleep_for(std::min(between, milliseconds(500)));
    begun = Clock::now();
    const HighestLease now = highest_in(run);
    if (now.number == 0) return 0;  // it has ended
    if (now.number != seen.number || now.text != seen.text)
      throw_taken(now, "it gave a sign of life");
  }
  return seen.number;
}

const LeaseOptions& require_meant(const LeaseOptions& options) {
  if (options.expires >= std::chrono::seconds(1) && options.expires <= kMostExpires) return options;
  throw Error(ErrorCode::invalid_argument,
              fmt::format("LeaseOptions::expires is {} ms, expected 1000 to {}",
                          options.expires.count(), kMostExpires.count()));
}

// What the threads of a lease have of it: they outlive it if a store does not answer.
class LeaseState {
 public:
  // `directory`: of the run, if it is not there yet; it goes with the lease if nothing else is in
  // it.
  LeaseState(std::shared_ptr<Store> run, std::string directory, milliseconds expires)
      : run_(std::move(run)), directory_(std::move(directory)), expires_(expires) {
    own_ = {.expires = expires, .id = random_attempt(), .host = host_name()};
    (void)failure_of([&] { own_.process = same_host::to_text(same_host::this_process()); });
  }

  // Makes the lease that follows that of a dead job, or the first one.
  void take(const std::stop_token& stop) {
    run_->require_writable(probe_name(random_attempt()), false);
    const std::uint64_t behind = free_behind(*run_, stop);
    number_ = behind + 1;
    last_sign_ = Clock::now();
    {
      const std::lock_guard lock(own_leases.mutex);
      own_leases.ids.insert(own_.id);
    }
    try {
      write_own(IfExists::fail);
      // Who was late finds that others have come and gone meanwhile, and one may have come to stay.
      const auto numbers = numbers_in(*run_);
      const bool is_late = std::ranges::any_of(
          numbers, [&](auto number) { return number != number_ && number != behind; });
      if (is_late) throw Error(ErrorCode::already_exists, "another lease is there");
    } catch (const Error& error) {
      give_up();  // it may be there all the same
      if (error.code() == ErrorCode::already_exists || error.code() == ErrorCode::conflict)
        throw_preceded();
      throw;
    }
  }
  void remove_older() const {
    for (const std::uint64_t older : numbers_in(*run_))
      if (older < number_) run_->remove(lease_name(older));
  }

  [[nodiscard]] std::uint64_t number() const noexcept { return number_; }
  [[nodiscard]] const std::string& place() const noexcept { return run_->name(); }
  [[nodiscard]] milliseconds expires() const noexcept { return expires_; }
  [[nodiscard]] std::stop_token lost() const noexcept { return lost_.get_token(); }
  // Empty: the run is this job's. Who loses it on another thread may not have asked for the stop
  // yet.
  [[nodiscard]] std::string why_lost() const {
    const std::lock_guard lock(mutex_);
    return why_;
  }

  // Whether the run is still this job's, as the time says, and the store.
  void look_at_time() {
    std::string failure;
    {
      const std::lock_guard lock(mutex_);
      if (Clock::now() - last_sign_ <= expires_ * 2 / 3) return;
      failure = failure_;
    }
    lose("the store has taken no sign of life for too long" +
         (failure.empty() ? "" : ": " + failure));
  }
  void look_at_store() {
    bool has_other = false;
    const auto failure = failure_of([&] { has_other = has_successor(); });
    if (has_other) lose("another one has taken it");
    if (failure) note(failure->what());
    look_at_time();
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
      note(failure->what());
      return;
    }
    const std::lock_guard lock(mutex_);
    last_sign_ = now;
  }
  // The run is free, if it was this job's; else nothing is left that could be taken for its lease.
  void give_up() {
    {
      const std::lock_guard lock(own_leases.mutex);
      own_leases.ids.erase(own_.id);
    }
    (void)failure_of([&] {
      if (is_own()) run_->remove(lease_name(number_));
    });
    std::error_code none;
    if (!directory_.empty()) std::filesystem::remove(directory_, none);
  }

 private:
  [[noreturn]] void throw_preceded() const {
    const HighestLease other = highest_in(*run_);
    if (other.number > 0) throw_taken(other, "it came first");
    // What has the name is no object: a directory, or a link that leads nowhere.
    throw Error(ErrorCode::corrupt, "what has the name of a lease cannot be opened")
        .at_path(run_->name() + "/" + lease_name(number_));
  }
  void write_own(IfExists if_exists) {
    const std::string text = own_.text();
    put(*run_, lease_name(number_), std::as_bytes(std::span(text)), if_exists);
  }
  [[nodiscard]] bool has_successor() const {
    const auto numbers = numbers_in(*run_);
    return std::ranges::any_of(numbers, [this](auto number) { return number > number_; }) ||
           !is_own();
  }
  // Whether the object is there, and is not another job's of the same number.
  [[nodiscard]] bool is_own() const {
    const auto source = open_if_there(*run_, lease_name(number_));
    return source && lease_from_text(lease_text(*source)).id == own_.id;
  }
  void note(std::string failure) {
    const std::lock_guard lock(mutex_);
    failure_ = std::move(failure);
  }
  void lose(const std::string& why) {
    {
      const std::lock_guard lock(mutex_);
      if (!why_.empty()) return;
      why_ = why;
    }
    lost_.request_stop();
    log(LogLevel::warning, "the run " + place() + " is not this job's any more: " + why);
  }

  const std::shared_ptr<Store> run_;
  const std::string directory_;
  const milliseconds expires_;
  std::uint64_t number_ = 0;
  LeaseText own_;  // of who makes it, then of the thread that gives signs
  std::stop_source lost_;
  mutable std::mutex mutex_;     // guards the rest
  Clock::time_point last_sign_;  // that the store took
  std::string failure_;          // of the last one that it did not take
  std::string why_;              // it is lost
};

}  // namespace

// Of the process that has the run: a thread gives signs, and another one looks at the time, since a
// store may not answer.
class RunLease::Held {
 public:
  Held(const Location& where, const LeaseOptions& options, const std::stop_token& stop)
      : state_(std::make_shared<LeaseState>(directory_store(where), new_directory(where),
                                            options.expires)) {
    state_->take(stop);
    try {
      begin();
      (void)failure_of([this] { state_->remove_older(); });
      // The writer process of a job that has died may still be at its last save: what it keeps in
      // memory this job may go on from at once.
      await_saves(where, Looks::at_run, stop, kept_meeting(where));
      require_going_on(stop);
    } catch (const std::system_error& error) {
      state_->give_up();
      throw Error(ErrorCode::io, std::string("no thread for the lease of a run: ") + error.what());
    } catch (...) {
      state_->give_up();
      throw;
    }
  }
  ~Held() {
    if (!made_here_) {
      static_cast<void>(signs_.release());  // there are no such threads in the child
      static_cast<void>(clock_.release());
      return;
    }
    clock_.reset();
    signs_->request_stop();
    // A store that does not answer keeps nobody.
    if (has_ended_->wait_for(std::min<milliseconds>(state_->expires(), kLongestEnd))) {
      signs_.reset();
    } else {
      signs_->detach();
    }
  }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;

  [[nodiscard]] std::uint64_t number() const noexcept { return state_->number(); }
  [[nodiscard]] std::stop_token lost() const noexcept { return state_->lost(); }

  void require_held() {
    if (!made_here_) {
      throw Error(ErrorCode::invalid_argument,
                  "this process was forked after its RunLease was made, which is its parent's");
    }
    if (state_->why_lost().empty()) state_->look_at_store();
    const std::string why = state_->why_lost();
    if (why.empty()) return;
    throw Error(ErrorCode::conflict, "the run is not this job's any more: " + why)
        .at_path(state_->place());
  }

 private:
  static constexpr std::chrono::seconds kLongestEnd{10};

  static std::string new_directory(const Location& run) {
    if (!is_on_disk(run)) return {};
    const auto path = std::filesystem::absolute(without_file_scheme(run.path));
    std::error_code none;
    return std::filesystem::exists(path, none) ? std::string() : path.string();
  }

  // Until somebody asks for the end or the run is lost.
  template <typename Work>
  static void repeat(LeaseState& state, const std::stop_token& end, milliseconds every,
                     const Work& work) {
    std::mutex mutex;
    std::condition_variable_any ended;
    std::unique_lock lock(mutex);
    while (!end.stop_requested() && state.why_lost().empty()) {
      (void)ended.wait_for(lock, end, every, [] { return false; });
      if (!end.stop_requested()) work();
    }
  }

  void begin() {
    const milliseconds every = state_->expires() / kSigns;
    signs_ = std::make_unique<std::jthread>(
        [state = state_, every, has_ended = has_ended_](const std::stop_token& end) {
          const HeedStop heed(end);
          repeat(*state, end, every, [&] {
            state->look_at_store();
            if (state->why_lost().empty()) state->give_sign();
          });
          const Settling settling;
          state->give_up();
          has_ended->make();
        });
    clock_ = std::make_unique<std::jthread>([state = state_, every](const std::stop_token& end) {
      repeat(*state, end, every / 4, [&] { state->look_at_time(); });
    });
  }

  const MadeHere made_here_;
  const std::shared_ptr<LeaseState> state_;
  const std::shared_ptr<Decision> has_ended_ = std::make_shared<Decision>();
  std::unique_ptr<std::jthread> signs_, clock_;
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
