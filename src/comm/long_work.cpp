#include "comm/long_work.h"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

#include "base/parallel.h"
#include "comm/confer.h"
#include "comm/whereabouts.h"

namespace tessera {
namespace {

// How often ranks hear of one another while they work.
constexpr std::chrono::milliseconds kBeat{200};

// What a rank says: one of these bytes, and an error behind `failed`.
constexpr std::byte kWorking{0};
constexpr std::byte kDone{1};
constexpr std::byte kFailed{2};

// The work of this rank, on a thread of its own that its end stops and joins.
class Running {
 public:
  Running(const std::stop_token& stop, const std::function<void(const std::stop_token&)>& work)
      : forward_(stop, [this] { source_.request_stop(); }),
        thread_([this, &work, job = thread_job()] {
          thread_job() = job;
          const HeedStop heeding(source_.get_token());
          auto failure = failure_of([&] { work(source_.get_token()); });
          const std::lock_guard lock(mutex_);
          failure_ = std::move(failure);
          ended_ = true;
          changed_.notify_all();
        }) {}
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;
  ~Running() { source_.request_stop(); }

  // What to tell the others after this beat, or earlier when the work has ended.
  [[nodiscard]] Bytes report_after_beat() {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, kBeat, [this] { return ended_; });
    if (!ended_) return {kWorking};
    if (!failure_) return {kDone};
    Bytes report = encode_error(*failure_);
    report.insert(report.begin(), kFailed);
    return report;
  }

  // What ended the work so far, if anything did.
  [[nodiscard]] std::optional<Error> failure() {
    const std::lock_guard lock(mutex_);
    return failure_;
  }

 private:
  std::stop_source source_;
  std::stop_callback<std::function<void()>> forward_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ended_ = false;            // guarded by mutex_
  std::optional<Error> failure_;  // guarded by mutex_
  std::jthread thread_;           // last: it uses the others
};

// For groups that carry no interrupts: ranks ask one another a few times a second.
void agree_by_asking(Group& group, const std::string& operation, const std::stop_token& stop,
                     const std::function<void(const std::stop_token&)>& work) {
  std::map<int, Error> failures;
  Running running(stop, work);
  const Purpose purpose("an agreement on long work");
  for (bool working = true; working && failures.empty();) {
    std::vector<Bytes> reports;
    try {
      reports = group.all_gather(running.report_after_beat());
    } catch (const Error& error) {
      if (const auto mine = running.failure()) throw with_loss(*mine, error).while_doing(operation);
      throw;
    }
    working = false;
    for (std::size_t rank = 0; rank < reports.size(); ++rank) {
      const std::byte state = reports[rank].at(0);
      working = working || state == kWorking;
      if (state != kFailed) continue;
      const auto error = std::span<const std::byte>(reports[rank]).subspan(1);
      add_failure(failures, static_cast<int>(rank), decode_error(error));
    }
  }
  if (failures.empty()) return;
  throw Error::from_peers(std::move(failures), group.size()).while_doing(operation);
}

}  // namespace

void work_interruptibly(Group& group, const std::stop_token& stop,
                        const std::function<void(const std::stop_token&)>& work) {
  std::stop_source either;
  const auto request = [&either] { either.request_stop(); };
  const std::stop_callback by_caller(stop, request);
  const std::stop_callback by_peer(group.interrupted(), request);
  const HeedStop heeding(either.get_token());
  const std::optional<Error> failure = failure_of([&] { work(either.get_token()); });
  if (!failure) return;
  const bool by_peer_alone = group.interrupted().stop_requested() && !stop.stop_requested();
  if (failure->code() == ErrorCode::cancelled && by_peer_alone) return;
  group.interrupt();
  throw Error(*failure);
}

void agree_on_long_work(Group& group, const std::string& operation, const std::stop_token& stop,
                        const std::function<void(const std::stop_token&)>& work) {
  if (group.size() == 1 || group.carries_interrupts()) {
    agree(group, operation, [&] { work_interruptibly(group, stop, work); });
  } else {
    agree_by_asking(group, operation, stop, work);
  }
}

Bytes confer_after_long_work(Group& group, const std::stop_token& stop,
                             const std::function<void(const std::stop_token&)>& work,
                             const std::string& operation, const Conference& conference) {
  const bool is_one = group.size() == 1 || group.carries_interrupts();
  if (!is_one) agree_on_long_work(group, operation, stop, work);
  const auto contribute = [&] {
    if (is_one) work_interruptibly(group, stop, work);
    return conference.contribute();
  };
  return confer(group, operation, {contribute, conference.combine, conference.conclude});
}

}  // namespace tessera
