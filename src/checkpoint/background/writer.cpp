// A save in the background, from the call to its end:
//   1. the calling thread waits for the arena, or has no tree for this save;
//   2. it copies the tree into the arena (snapshot.h) and hands over the job; what stays as it is
//      until the next step may be left to a thread of this save alone (overlap.h);
//   3. the thread waits until all is copied, and saves what is copied, by save_or_fail(): whoever
//      had no tree fails there, together with all other ranks;
//   4. it takes the job off the list, decides the outcome and calls back.
// Every call is one job on every rank, so that the ranks' threads always do the same save; what one
// process refuses for itself is none. In 4 the list and the outcome change together: who has heard
// how a save ended finds the arena free, and who finds it free hears of a failure.
#include "checkpoint/background/writer.h"

#include <sched.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <exception>
#include <filesystem>
#include <string_view>
#include <system_error>
#include <utility>

#include <fmt/format.h>

#include "base/log.h"
#include "base/parallel.h"
#include "checkpoint/background/job_message.h"
#include "checkpoint/background/store_group.h"
#include "checkpoint/open/arena_tree.h"
#include "checkpoint/save.h"
#include "comm/confer.h"
#include "comm/message.h"
#include "comm/segment.h"
#include "comm/whereabouts.h"
#include "storage/storage.h"
#include "tessera/comm.h"
#include "tessera/library.h"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kLongestEnd = std::chrono::hours(24 * 365);
constexpr std::chrono::milliseconds kLongestGrace{10'000};  // for what is asked to end

void require_parents_not(const MadeHere& made, const char* what) {
  if (made) return;
  throw Error(ErrorCode::invalid_argument,
              std::string("this process was forked after its CheckpointWriter was made, and ") +
                  what + " is its parent's: make a writer in the child");
}

// The same place after a chdir().
Location lasting(Location where) {
  if (!where.store && !where.path.empty() && scheme_of(where.path).empty())
    where.path = std::filesystem::absolute(where.path).string();
  return where;
}

constexpr std::string_view kRefusal = "an earlier save is under way (IfBusy::refuse)";

// Whether nothing else failed, here or on other ranks. Their messages come as they are.
bool is_refusal(const Error& failure) {
  if (failure.peers().empty()) return failure.message() == kRefusal;
  return std::ranges::all_of(failure.peers(),
                             [](const auto& peer) { return peer.second.message() == kRefusal; });
}

void warn_untaken(const SaveOutcome& outcome) {
  log(LogLevel::warning, "the save in the background to " + outcome.place() +
                             " failed, and nobody took its error: " + outcome.failure()->what());
}

// A directory of one save beside the place, or in it if that is all that there is.
std::string meeting_beside(std::string place, const std::string& name) {
  while (place.size() > 1 && place.ends_with('/')) place.pop_back();
  const std::size_t slash = place.rfind('/');
  const bool is_root = slash != std::string::npos && slash > 0 && place[slash - 1] == '/';
  if (slash != std::string::npos && !is_root) place.resize(slash);
  return place + "/" + name;
}

Bytes same_place(const Bytes& left, const Bytes& right) {
  if (left == right) return left;
  throw Error(ErrorCode::mismatch,
              "ranks save to different places: " + to_text(left) + " and " + to_text(right));
}

}  // namespace

void run_when_idle() {
  const sched_param none{};
  if (::sched_setscheduler(0, SCHED_IDLE, &none) == 0) return;
  constexpr int kLeast = 19;
  if (::setpriority(PRIO_PROCESS, static_cast<id_t>(::gettid()), kLeast) == 0) return;
  log(LogLevel::info, "the thread of a CheckpointWriter has the priority of its process");
}

void SaveOutcome::require_own() const {
  require_parents_not(made_here_, "the save");
}

void SaveOutcome::set_copy(std::shared_ptr<CopyUnderWay> copy) {
  copy_ = std::move(copy);
}

void SaveOutcome::pass_copy() {
  if (copy_) copy_->pass();
}

bool SaveOutcome::pass_copy_within(std::chrono::milliseconds time) {
  return !copy_ || copy_->pass_within(time);
}

void SaveOutcome::hurry(std::chrono::milliseconds within) {
  if (copy_) copy_->hurry(within);
}

void SaveOutcome::end_staging(bool is_staged) {
  is_staged_ = is_staged;
  staging_.make();
}

void SaveOutcome::decide(SaveResult result, std::optional<Error> failure) {
  result_ = std::move(result);
  failure_ = std::move(failure);
  decision_.make();
}

BackgroundWriter::Job::Job(const Location& to, const SaveOptions& how, SaveDone hook)
    : where(to),
      options(how),
      done(std::move(hook)),
      outcome(std::make_shared<SaveOutcome>(to_string(to))),
      forward(how.stop, [this] { stop.request_stop(); }) {
  options.stop = stop.get_token();
}

BackgroundWriter::BackgroundWriter(std::shared_ptr<Group> group, const WriterOptions& options)
    : options_(options),
      group_(std::move(group)),
      is_alone_(group_->size() == 1),
      arena_(options.bytes, options.threads, options.process),
      overlap_(options.overlap) {
  if (options.process) start_process();
}

void BackgroundWriter::start() {
  try {
    thread_ = std::make_unique<std::thread>([self = shared_from_this()] { self->run(); });
  } catch (const std::system_error& error) {
    throw Error(ErrorCode::io, std::string("no thread for a CheckpointWriter: ") + error.what());
  }
}

void BackgroundWriter::require_usable() const {
  require_parents_not(made_here_, "the writer");
  if (thread_job().behind == nullptr) return;
  throw Error(ErrorCode::invalid_argument,
              "a CheckpointWriter is called by a hook of a save in the background");
}

BackgroundWriter::Outcomes BackgroundWriter::untaken() {
  Outcomes found;
  for (auto& outcome : std::exchange(failed_, {}))
    if (outcome->take()) found.push_back(std::move(outcome));
  return found;
}

namespace {

// The first; the others become warnings. None: there are none.
std::optional<Error> error_of(const std::vector<std::shared_ptr<SaveOutcome>>& untaken) {
  if (untaken.empty()) return std::nullopt;
  for (std::size_t i = 1; i < untaken.size(); ++i) warn_untaken(*untaken[i]);
  return Error(*untaken.front()->failure())
      .while_doing("an earlier save in the background, to " + untaken.front()->place());
}

}  // namespace

BackgroundWriter::Outcomes BackgroundWriter::under_way() {
  Outcomes found;
  const std::lock_guard lock(mutex_);
  for (const auto& job : jobs_) found.push_back(job->outcome);
  return found;
}

// The caller comes by.
void BackgroundWriter::pass_copies(Clock::time_point until, const std::stop_token& stop) {
  constexpr std::chrono::milliseconds kBetweenLooks{50};
  for (const auto& outcome : under_way()) {
    const auto left = [&] {
      const auto time = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now());
      return std::clamp(time, std::chrono::milliseconds(0), kBetweenLooks);
    };
    while (!outcome->pass_copy_within(left()) && left().count() > 0 && !stop.stop_requested())
      continue;
  }
}

// Waits for the turn, and for the arena, if that is the option. Returns the error of an earlier
// save that is to be thrown; what a callback is there to take is none yet. The job fails if it does
// not get the arena. Where other ranks do the same saves, a stop does not end the wait for the
// turn: their order is that of the calls.
std::optional<Error> BackgroundWriter::turn_of(Job& job) {
  const std::stop_callback wake(job.options.stop, [this] {
    const std::lock_guard lock(mutex_);
    changed_.notify_all();
  });
  const bool is_patient = options_.if_busy == IfBusy::wait;
  pass_copies(is_patient ? Clock::now() + kLongestEnd : Clock::now(), job.stop.get_token());
  Outcomes earlier;
  bool is_free = false;
  {
    std::unique_lock lock(mutex_);
    const auto is_stopped = [&] { return job.stop.stop_requested(); };
    wait_for_change(changed_, lock, [&] { return !is_turn_taken_ || (is_alone_ && is_stopped()); });
    job.has_turn = !std::exchange(is_turn_taken_, true);
    if (job.has_turn) job.number = ++calls_;
    const auto may_go = [&] { return is_at_rest() || is_stopped(); };
    if (is_patient) wait_for_change(changed_, lock, may_go);
    if (!is_calling_back_) earlier = untaken();
    is_free = jobs_.empty();
  }
  const std::optional<Error> error = error_of(earlier);
  if (error) {
    job.failure = Error(error->code(), std::string("an earlier save had failed: ") + error->what());
    job.outcome->take();  // the caller hears of it now
    job.done = nullptr;
  } else if (job.stop.stop_requested()) {
    job.failure = *failure_of([] { throw_cancelled(); });
  } else if (!is_free) {
    job.failure = Error(ErrorCode::limit, std::string(kRefusal)).at_path(job.outcome->place());
  }
  return error;
}

// Copies what cannot be left for stage_rest().
void BackgroundWriter::stage(Job& job, const Value& tree) {
  job.copying = Clock::now();
  job.under_way.emplace(job.where,
                        std::shared_ptr<const Decision>(job.outcome, &job.outcome->decision()));
  auto& snapshot = job.snapshot.emplace(tree);
  // A pace of its own: a save that was cancelled leaves no bytes that the next would wait for.
  const bool is_paced = options_.rate > 0 && !process_;  // a process reads at a pace by itself
  const auto pace = is_paced ? std::make_shared<Pace>(options_.rate) : nullptr;
  const bool may_be = options_.overlap == Overlap::always || job.steady.is_awaited;
  const bool is_wanted =
      job.steady.has && may_be && overlap_.is_beside_step(job.steady.require_unchanged);
  try {
    job.tree = snapshot.take(arena_, options_.threads, pace,
                             is_wanted ? job.steady.has : std::function<bool(const Storage&)>());
  } catch (...) {
    overlap_.note_failure();
    throw;
  }
  job.copied = Clock::now();
  job.is_beside_step = snapshot.has_rest();
}

// What its caller has is free then.
void BackgroundWriter::end_staging(Job& job, std::optional<Error> failure) {
  job.snapshot.reset();
  job.steady = {};
  job.settled = Clock::now();
  if (!failure && process_) failure = failure_of([&] { hand_over(job); });
  if (failure) job.failure = std::move(failure);
}

// Who hears that all is copied may end the writer: this thread has nothing of it then.
void BackgroundWriter::settle(std::shared_ptr<BackgroundWriter> self, std::shared_ptr<Job> job,
                              std::optional<Error> failure) {
  self->end_staging(*job, std::move(failure));
  const auto outcome = job->outcome;
  const bool is_staged = !job->failure;
  job.reset();
  self.reset();
  outcome->end_staging(is_staged);
}

// What the caller is asked; also why it was not.
std::optional<Error> BackgroundWriter::change_of(const Job& job, CopyUnderWay& copy) {
  std::optional<Error> change;
  const bool is_asked = copy.ask_caller([&] { change = failure_of(job.steady.require_unchanged); },
                                        options_.ask_within, job.stop.get_token());
  if (!is_asked) return failure_of([] { throw_cancelled(); });
  if (change) overlap_.note_change();
  return change;
}

// A thread for each save: that of the writer runs where no other does, and cannot leave that. What
// libtorch counts is an operation that has ended. So nothing is written before the caller has come
// by, whose own operations have ended then, or has stayed away for long.
void BackgroundWriter::stage_rest(const std::shared_ptr<Job>& caller_job) {
  auto copy = std::make_shared<CopyUnderWay>();
  auto work = [self = shared_from_this(), job = caller_job, copy]() mutable {
    const bool was_copying = std::exchange(thread_job().is_copying, true);
    auto failure = failure_of([&] { job->snapshot->take_rest(self->options_.threads); });
    thread_job().is_copying = was_copying;
    job->copied = Clock::now();
    if (failure) {
      self->overlap_.note_failure();
    } else if (job->steady.require_unchanged) {
      failure = self->change_of(*job, *copy);
    }
    copy->end();
    settle(std::move(self), std::move(job), std::move(failure));
  };
  try {
    std::thread(work).detach();
  } catch (const std::system_error&) {
    work();
  }
  caller_job->outcome->set_copy(std::move(copy));
}

// Gives the turn of a job back, if it has one. Before that the job is on the list, or has failed.
class BackgroundWriter::Turn {
 public:
  Turn(BackgroundWriter& writer, const Job& job) : writer_(writer), job_(job) {}
  ~Turn() {
    const std::lock_guard lock(writer_.mutex_);
    if (job_.has_turn) writer_.is_turn_taken_ = false;
    writer_.changed_.notify_all();
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  BackgroundWriter& writer_;
  const Job& job_;
};

PendingSave BackgroundWriter::save(const Value& tree, const Location& where,
                                   const SaveOptions& options, SaveDone done, SteadyMemory steady) {
  require_usable();
  const auto job = std::make_shared<Job>(where, options, std::move(done));
  Jobs listed{job};  // memory for that is there when the copy has begun
  const Turn turn(*this, *job);
  job->called = Clock::now();
  job->steady = std::move(steady);
  std::optional<Error> earlier;
  std::optional<Error> unable = failure_of([&] {
    earlier = turn_of(*job);
    if (job->failure) return;
    job->where = lasting(where);
    stage(*job, tree);
  });
  const bool is_refused = is_alone_ && job->failure && is_refusal(*job->failure);
  if (job->is_beside_step) unable = failure_of([&] { stage_rest(job); });
  if (unable || !job->is_beside_step) {
    if (job->failure) unable = job->failure;
    end_staging(*job, std::move(unable));
    job->outcome->end_staging(!job->failure);
  }
  job->handed_over = Clock::now();
  {
    const std::lock_guard lock(mutex_);
    if (is_refused) {
      job->outcome->decide({}, job->failure);
    } else {
      jobs_.splice(jobs_.end(), listed);
    }
    changed_.notify_all();
  }
  if (earlier) throw Error(*earlier);
  return PendingSave(job->outcome);
}

void BackgroundWriter::wait() {
  require_usable();
  pass_copies(Clock::now() + kLongestEnd);
  Outcomes earlier;
  {
    std::unique_lock lock(mutex_);
    wait_for_change(changed_, lock, [this] { return is_at_rest(); });
    earlier = untaken();
  }
  if (const std::optional<Error> error = error_of(earlier)) throw Error(*error);
}

void BackgroundWriter::require_alive() const {
  require_usable();
  if (process_) process_->require_alive();
}

// By a process: its trainers agree that all have staged, and leave the save to their writers. Then
// they tell each other what these have said.

void BackgroundWriter::start_process() {
  WriterHello hello{
      .version = std::string(version()),
      .rank = group_->rank(),
      .size = group_->size(),
      .idle = options_.idle,
      .rate = options_.rate,
      .silence = static_cast<std::uint64_t>(std::min(options_.silence, kLongestEnd).count()),
      .keep = static_cast<std::uint64_t>(std::min(options_.keep, kLongestEnd).count()),
      .has_partner = options_.partner > 0};
  (void)failure_of([&] { hello.trainer = same_host::to_text(same_host::this_process()); });
  const auto begin = [&] {
    process_ = std::make_unique<WriterProcess>(options_.program, hello);
    return Bytes();
  };
  const auto draw = [](const Bytes&) { return to_bytes(random_attempt()); };
  id_ = to_text(confer(*group_, "starting a writer process", {begin, combine_nothing, draw}));
  if (options_.partner > 0)
    process_->copy_from(choose_partners(*group_, [this] { return process_->peer_place(); }));
}

// What the process needs to finish the save without anybody's help.
void BackgroundWriter::hand_over(const Job& job) {
  if (job.where.store) {
    throw Error(ErrorCode::unsupported,
                "a writer of another process has no store of this one: give it a path or a URL")
        .at_path(to_string(job.where));
  }
  require_sendable(job.options);
  WriterJob what{.number = job.number, .place = job.where.path};
  what.meeting = meeting_beside(job.where.path, meeting_name(id_, job.number));
  what.writer = id_;
  what.overwrites = arena_.overwrites();
  what.used = arena_.used();
  what.is_kept = may_be_kept(job.options);
  what.options = message_of_options(job.options);
  what.tree = message_of_tree(job.tree, arena_.memory());
  what.hears_events = static_cast<bool>(job.options.events);
  what.hears_progress = static_cast<bool>(job.options.progress);
  process_->begin(what, arena_);
}

SaveResult BackgroundWriter::save_by_process(const Job& job) {
  const Purpose purpose("saving a checkpoint in the background");
  const auto staged = [&] {
    if (job.failure) throw Error(*job.failure);
    process_->require_alive();
    return to_bytes(job.where.path);
  };
  const auto failure = failure_of([&] {
    (void)confer(*group_, "staging a checkpoint",
                 {staged, same_place, [](const Bytes&) { return Bytes(); }});
  });
  // Of ranks that are lost nobody knows whether they had staged: the writers find out.
  const bool is_agreed = failure && (is_alone_ || !failure->peers().empty());
  if (is_agreed || job.failure) {
    process_->drop(job.number);
    throw Error(*failure);
  }
  SaveResult result;
  auto outcome = failure_of([&] {
    process_->go(job.number);
    result = process_->result(job.number, job.options);
  });
  auto lost = failure;
  if (!lost) {
    lost = failure_of([&] {
      agree(*group_, "saving a checkpoint by writer processes", [&] {
        if (outcome) throw Error(*outcome);
      });
    });
    if (lost && !lost->peers().empty()) throw Error(*lost);
  }
  // Whether the other trainers live or not: the checkpoint is there.
  if (outcome) throw lost ? with_loss(*outcome, *lost) : Error(*outcome);
  return result;
}

void BackgroundWriter::run() {
  thread_job().behind = this;
  if (options_.idle) run_when_idle();
  while (const std::shared_ptr<Job> job = next()) {
    job->outcome->staging().wait();
    SaveResult result;
    std::optional<Error> failure = failure_of([&] {
      result = process_ ? save_by_process(*job)
                        : save_or_fail(job->failure, job->tree, job->where, job->options, *group_);
    });
    job->tree = Value();
    end(*job, std::move(result), std::move(failure));
  }
  process_.reset();  // it has nothing left to do
  const std::lock_guard lock(mutex_);
  has_ended_ = true;
  changed_.notify_all();
}

// Null: the writer ends.
std::shared_ptr<BackgroundWriter::Job> BackgroundWriter::next() {
  std::unique_lock lock(mutex_);
  wait_for_change(changed_, lock, [this] { return !jobs_.empty() || is_closing_; });
  return jobs_.empty() ? nullptr : jobs_.front();
}

void BackgroundWriter::end(Job& job, SaveResult result, std::optional<Error> failure) {
  const bool is_refused = failure && is_refusal(*failure);
  if (!failure) log_cost(job, result);
  {
    const std::lock_guard lock(mutex_);
    jobs_.pop_front();
    is_calling_back_ = static_cast<bool>(job.done);
    if (failure && !is_refused) failed_.push_back(job.outcome);
    job.outcome->decide(std::move(result), std::move(failure));
    changed_.notify_all();
  }
  job.under_way.reset();
  if (is_refused) {
    log(LogLevel::info, "the save in the background to " + job.outcome->place() +
                            " was refused: " + job.outcome->failure()->what());
  }
  if (!job.done) return;
  if (const auto thrown = failure_of([&] { job.done(PendingSave(job.outcome)); })) {
    log(LogLevel::warning, "the hook that heard of the save to " + job.outcome->place() +
                               " failed: " + thrown->what());
  }
  const std::lock_guard lock(mutex_);
  is_calling_back_ = false;
  changed_.notify_all();
}

// What a save cost this rank, and whether it had more to write than others.
void BackgroundWriter::log_cost(const Job& job, const SaveResult& result) const {
  const auto seconds = [](Clock::duration time) {
    return std::chrono::duration<double>(time).count();
  };
  std::string share;
  if (!is_alone_ && result.total_bytes > 0) {
    share = fmt::format(", {:.1f} times the mean of {} ranks",
                        static_cast<double>(result.bytes_written) * group_->size() /
                            static_cast<double>(result.total_bytes),
                        group_->size());
  }
  log(LogLevel::info,
      fmt::format("saved {} in the background: {} bytes by this rank{}; save() took {:.3f} s, {} "
                  "{:.3f} s to copy, and the rest {:.3f} s",
                  job.outcome->place(), result.bytes_written, share,
                  seconds(job.handed_over - job.called),
                  job.is_beside_step ? "beside the next step" : "of which",
                  seconds(job.copied - job.copying),
                  seconds(Clock::now() - std::max(job.handed_over, job.settled))));
}

// Whether the thread has ended before the time is over. Before that it asks what is left to end.
bool BackgroundWriter::await_end(Clock::time_point until) {
  const auto has_ended = [this] { return has_ended_; };
  const auto grace = std::min(kLongestGrace, std::min(options_.end_within, kLongestEnd) / 2);
  std::unique_lock lock(mutex_);
  if (changed_.wait_until(lock, until - grace, has_ended)) return true;
  const auto left = jobs_;
  lock.unlock();
  for (const auto& job : left) job->stop.request_stop();
  lock.lock();
  return changed_.wait_until(lock, until, has_ended);
}

void BackgroundWriter::close() {
  if (!made_here_) {
    static_cast<void>(thread_.release());  // there is no such thread in the child
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    // Whoever starts again needs what the process has.
    const bool has_failed = is_left_ || std::uncaught_exceptions() > made_among_exceptions_;
    if (process_ && has_failed) process_->leave();
    is_closing_ = true;
    changed_.notify_all();
  }
  // Before the time at which what is left is asked to stop, nobody waits for the caller any more.
  const auto within = std::min(options_.end_within, kLongestEnd);
  const auto until = Clock::now() + within;
  for (const auto& outcome : under_way()) outcome->hurry(within / 4);
  pass_copies(until - within / 2);
  // A hook that ends its own writer cannot wait for itself: the thread goes on with what it has.
  const bool is_own_hook = thread_job().behind == this;
  if (!is_own_hook && await_end(until)) {
    thread_->join();
  } else {
    thread_->detach();
  }
  Outcomes lost;
  {
    const std::lock_guard lock(mutex_);
    lost = untaken();
  }
  for (const auto& outcome : lost) warn_untaken(*outcome);
  for (const auto& outcome : under_way()) {
    log(LogLevel::warning, "the save in the background to " + outcome->place() +
                               " had not ended when its writer did: whether it is complete is not "
                               "known");
  }
}

}  // namespace tessera
