// The thread of a CheckpointWriter, and what it has to do.
#pragma once

#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include "base/copies.h"
#include "base/process.h"
#include "checkpoint/background/arena.h"
#include "checkpoint/background/overlap.h"
#include "checkpoint/background/process.h"
#include "checkpoint/background/snapshot.h"
#include "checkpoint/open/under_way.h"
#include "tessera/checkpoint_writer.h"
#include "tessera/error.h"

namespace tessera {

// How a save ended, for its handles, its writer and whoever waits for its place.
class SaveOutcome {
 public:
  explicit SaveOutcome(std::string place) : place_(std::move(place)) {}

  [[nodiscard]] const std::string& place() const noexcept { return place_; }
  [[nodiscard]] const Decision& decision() const noexcept { return decision_; }
  // Throws `invalid_argument` in a child of fork().
  void require_own() const;

  // What goes on when save() has returned; before others have the outcome.
  void set_copy(std::shared_ptr<CopyUnderWay> copy);
  void pass_copy();
  bool pass_copy_within(std::chrono::milliseconds time);  // whether it has
  // As CopyUnderWay has it.
  void hurry(std::chrono::milliseconds within);
  // Once: whether this rank's tensors are copied.
  void end_staging(bool is_staged);
  [[nodiscard]] bool is_staged() const noexcept { return staging_.is_made() && is_staged_; }
  [[nodiscard]] const Decision& staging() const noexcept { return staging_; }

  void decide(SaveResult result, std::optional<Error> failure);
  // Once it is decided.
  [[nodiscard]] const SaveResult& result() const noexcept { return result_; }
  [[nodiscard]] const std::optional<Error>& failure() const noexcept { return failure_; }
  // Somebody has heard of the failure. Returns whether nobody had before.
  bool take() noexcept { return !is_taken_.exchange(true); }

 private:
  const std::string place_;
  const MadeHere made_here_;
  std::shared_ptr<CopyUnderWay> copy_;  // null: save() has copied all
  Decision staging_;
  bool is_staged_ = false;  // once that is made
  Decision decision_;
  SaveResult result_;             // once it is decided
  std::optional<Error> failure_;  // likewise; none: the checkpoint is there
  std::atomic<bool> is_taken_ = false;
};

// From now on this thread, and those that it starts, run where nobody else does.
void run_when_idle();

// What a CheckpointWriter does. Its thread shares it, and so outlives a writer that cannot wait any
// longer. The first job is the one under way; its arena is free when it is off the list.
class BackgroundWriter : public std::enable_shared_from_this<BackgroundWriter> {
 public:
  BackgroundWriter(std::shared_ptr<Group> group, const WriterOptions& options);

  void start();
  [[nodiscard]] PendingSave save(const Value& tree, const Location& where,
                                 const SaveOptions& options, SaveDone done, SteadyMemory steady);
  void wait();
  [[nodiscard]] int ranks() const noexcept { return group_->size(); }
  void require_alive() const;
  void leave() noexcept { is_left_ = true; }
  void close();

 private:
  struct Job {
    Job(const Location& to, const SaveOptions& how, SaveDone hook);

    std::uint64_t number = 0;  // of the calls that had their turn, the same on all ranks
    Value tree;
    Location where;
    SaveOptions options;
    SaveDone done;
    bool has_turn = false;
    std::optional<Error> failure;  // why this rank has no tree; once staging is over
    std::optional<TreeSnapshot> snapshot;
    SteadyMemory steady;
    bool is_beside_step = false;  // part of it is copied when save() has returned
    const std::shared_ptr<SaveOutcome> outcome;
    std::optional<UnderWay> under_way;  // none: nothing is saved
    // When save() was called, began and ended to copy, and was about to return; and when the
    // thread could go on.
    std::chrono::steady_clock::time_point called, copying, copied, handed_over, settled;
    std::stop_source stop;
    std::stop_callback<std::function<void()>> forward;  // of the caller's stop
  };
  using Outcomes = std::vector<std::shared_ptr<SaveOutcome>>;
  using Jobs = std::list<std::shared_ptr<Job>>;

  void require_usable() const;
  [[nodiscard]] Outcomes untaken();  // with mutex_ held
  [[nodiscard]] bool is_at_rest() const { return jobs_.empty() && !is_calling_back_; }  // likewise
  [[nodiscard]] Outcomes under_way();  // takes mutex_
  void pass_copies(std::chrono::steady_clock::time_point until, const std::stop_token& stop = {});
  [[nodiscard]] std::optional<Error> turn_of(Job& job);
  void stage(Job& job, const Value& tree);
  [[nodiscard]] std::optional<Error> change_of(const Job& job, CopyUnderWay& copy);
  void stage_rest(const std::shared_ptr<Job>& job);
  static void settle(std::shared_ptr<BackgroundWriter> self, std::shared_ptr<Job> job,
                     std::optional<Error> failure);
  class Turn;
  void end_staging(Job& job, std::optional<Error> failure);
  void start_process();
  void hand_over(const Job& job);
  [[nodiscard]] SaveResult save_by_process(const Job& job);

  void run();
  [[nodiscard]] std::shared_ptr<Job> next();
  void end(Job& job, SaveResult result, std::optional<Error> failure);
  void log_cost(const Job& job, const SaveResult& result) const;
  [[nodiscard]] bool await_end(std::chrono::steady_clock::time_point until);

  const MadeHere made_here_;
  const int made_among_exceptions_ = std::uncaught_exceptions();
  std::atomic<bool> is_left_ = false;  // the trainer has failed
  const WriterOptions options_;
  const std::shared_ptr<Group> group_;
  const bool is_alone_;    // of one rank: no other has to do the same saves in the same order
  Arena arena_;            // of who has the turn, and of the first job
  OverlapChoice overlap_;  // of who has the turn
  std::string id_;         // of the writer on all ranks, where it is a process
  std::unique_ptr<WriterProcess> process_;  // null: the thread does it
  std::mutex mutex_;                        // guards the rest
  std::uint64_t calls_ = 0;
  std::condition_variable changed_;
  bool is_turn_taken_ = false;  // one thread prepares a save at a time
  Jobs jobs_;
  Outcomes failed_;  // of which untaken() asks
  bool is_calling_back_ = false;
  bool is_closing_ = false;
  bool has_ended_ = false;
  std::unique_ptr<std::thread> thread_;  // null before start()
};

}  // namespace tessera
