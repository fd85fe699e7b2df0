#include <algorithm>
#include <array>
#include <filesystem>
#include <functional>
#include <set>
#include <string>
#include <utility>

#include "base/parallel.h"
#include "base/process.h"
#include "checkpoint/load/own_files.h"
#include "checkpoint/open/located.h"
#include "checkpoint/open/under_way.h"
#include "checkpoint/run/judge.h"
#include "checkpoint/run/kept_checkpoint.h"
#include "checkpoint/run/steps.h"
#include "comm/confer.h"
#include "comm/long_work.h"
#include "comm/message.h"
#include "comm/whereabouts.h"
#include "storage/posix/lock.h"
#include "storage/posix/system.h"
#include "tessera/error.h"
#include "tessera/run_directory.h"

namespace tessera {
namespace {

constexpr const char* kLeft = " is passed over: the run has gone on from an earlier step";
constexpr const char* kDamaged = " is damaged and passed over: ";

std::string and_more(const std::vector<std::string>& texts) {
  return texts.size() == 1 ? texts.front()
                           : texts.front() + " (and " + std::to_string(texts.size() - 1) + " more)";
}

// Why there is no latest one, though there are checkpoints.
[[noreturn]] void refuse(const std::vector<std::string>& warnings, bool any_left,
                         const Location& run) {
  const std::string why = and_more(warnings);
  throw Error(any_left ? ErrorCode::conflict : ErrorCode::corrupt,
              (any_left ? "no checkpoint of the run is whole but those that it left: "
                        : "every checkpoint of the run is damaged: ") +
                  why)
      .at_path(to_string(run));
}

}  // namespace

std::vector<RunCheckpoint> run_checkpoints(const Location& run) {
  await_saves(run, Looks::at_run);
  std::vector<RunCheckpoint> checkpoints;
  for (const StepDirectory& one : marked(run, standing(step_directories(run))))
    checkpoints.push_back({one.step, one.unsharded, directory_in(run, one.directory)});
  return checkpoints;
}

namespace {

LatestCheckpoint latest_stored(const Location& run, const RunCheck& check) {
  LatestCheckpoint latest;
  bool any_left = false;
  const LeftLine left = read_left(*directory_store(run));
  for (const StepDirectory& one : standing(step_directories(run))) {
    const Location where = directory_in(run, one.directory);
    if (marker_in(*directory_store(where)).empty()) continue;
    if (is_left(left, run, one.directory)) {
      any_left = true;
      latest.warnings.push_back(one.directory + kLeft);
      continue;
    }
    const std::optional<Error> fault = fault_of(where, check);
    if (!fault) {
      latest.found = {one.step, one.unsharded, where};
      return latest;
    }
    latest.warnings.push_back(one.directory + kDamaged + fault->what());
  }
  if (!latest.warnings.empty()) refuse(latest.warnings, any_left, run);
  return latest;
}

LatestCheckpoint latest_stored(const Location& run, const RunCheck& check, Group& group) {
  LatestCheckpoint latest;
  bool any_left = false;
  for (SeenStep& one : seen_steps(run, group)) {
    const std::string name = run_checkpoint_name(one.step, one.unsharded);
    if (one.is_left) {
      any_left = true;
      latest.warnings.push_back(name + kLeft);
      continue;
    }
    const Judgement judgement = judge(one.where, check, group);
    if (!judgement.fault) {
      latest.found = {one.step, one.unsharded, std::move(one.where)};
      return latest;
    }
    latest.warnings.push_back(name + kDamaged + judgement.fault->what());
  }
  if (!latest.warnings.empty()) refuse(latest.warnings, any_left, run);
  return latest;
}

}  // namespace

LatestCheckpoint latest_checkpoint(const Location& run, const RunCheck& check) {
  require_threads(check.threads);
  const auto await = [&](const std::string& but) {
    await_saves(run, Looks::at_run, check.stop, but);
  };
  return newest_of(
      kept_choice(run, check), [&] { return latest_stored(run, check); }, await);
}

LatestCheckpoint latest_checkpoint(const Location& run, const RunCheck& check, Group& group) {
  const Purpose purpose("looking for the latest checkpoint");
  if (group.size() == 1) return latest_checkpoint(run, check);
  const auto await = [&](const std::string& but) {
    await_saves(run, Looks::at_run, check.stop, but);
  };
  return newest_of(
      kept_choice(run, check, group), [&] { return latest_stored(run, check, group); }, await);
}

// What a run keeps of its checkpoints.

namespace {

namespace fs = std::filesystem;
using Role = StepDirectory::Role;

constexpr const char* kVerifying = "verifying the new checkpoint before older ones are removed";
constexpr const char* kUnjudged = " stays, it cannot be judged: ";

void require_whole(const RunCheckpoint& saved, const RunCheck& check) {
  if (marker_in(*directory_store(saved.where)).empty()) {
    throw Error(ErrorCode::incomplete, "the new checkpoint has neither .metadata nor config.yaml")
        .at_path(to_string(saved.where));
  }
  if (std::optional<Error> fault = fault_of(saved.where, check))
    throw fault->while_doing(kVerifying);
}

// As OLMo's trainer links, but in one step: a reader finds the old one or the new one.
void link_latest(const std::string& run, const RunCheckpoint& saved) {
  const fs::path link = fs::path(run) / (saved.unsharded ? "latest-unsharded" : "latest");
  const fs::path made =
      fs::path(run) / ("." + link.filename().string() + ".tmp-" + random_attempt());
  std::error_code error;
  fs::create_directory_symlink(run_checkpoint_name(saved.step, saved.unsharded), made, error);
  if (error) throw_errno(error.value(), "make a link", made);
  fs::rename(made, link, error);
  if (!error) return;
  std::error_code ignored;
  fs::remove(made, ignored);
  throw_errno(error.value(), "replace the link", link);
}

// With what no store lists.
void remove_directory(const std::string& path) {
  std::error_code error;
  fs::remove_all(path, error);
  if (error) throw_errno(error.value(), "remove an old checkpoint", path);
}

// The three lists, and how many checkpoints each has so far.
class Lists {
 public:
  Lists(const RunCheckpoint& saved, const Retention& retention) : retention_(retention) {
    count(saved.step, saved.unsharded);
  }

  [[nodiscard]] std::int64_t limit_of(std::int64_t step, bool unsharded) const {
    const std::array limits{retention_.sharded, retention_.unsharded, retention_.ephemeral};
    return limits[list_of(step, unsharded)];
  }
  [[nodiscard]] bool has_place(std::int64_t step, bool unsharded) const {
    return kept_[list_of(step, unsharded)] < limit_of(step, unsharded);
  }
  void count(std::int64_t step, bool unsharded) { ++kept_[list_of(step, unsharded)]; }

 private:
  // Positions in the tables of lists.
  static constexpr std::size_t kSharded = 0, kUnsharded = 1, kEphemeral = 2;

  [[nodiscard]] std::size_t list_of(std::int64_t step, bool unsharded) const {
    if (unsharded) return kUnsharded;
    return retention_.is_ephemeral && retention_.is_ephemeral(step) ? kEphemeral : kSharded;
  }

  const Retention& retention_;
  std::array<std::int64_t, 3> kept_{};  // by list
};

// What ranks on several disks have decided to keep, by the names of their steps.
using Kept = std::set<std::string>;

// Goes through the directories of a run, each by itself, the newest first.
class Retainer {
 public:
  // `kept`: null where this rank judges.
  Retainer(const Location& run, const RunCheckpoint& saved, const Retention& retention,
           const Kept* kept = nullptr)
      : run_(run), saved_(saved), retention_(retention), lists_(saved, retention), kept_(kept) {}

  RetentionReport retain() {
    const std::vector<StepDirectory> all = step_directories(run_);
    std::set<std::string> standing_ones;
    for (const StepDirectory& one : standing(all)) standing_ones.insert(one.directory);
    note_saved(standing_ones);
    for (const StepDirectory& one : all) {
      const bool stands = standing_ones.contains(one.directory);
      if (one.step > saved_.step) {
        if (stands) warn_of_later(one);
      } else if (lists_.limit_of(one.step, one.unsharded) >= 0) {
        stands ? settle(one) : remove_aside(one);
      }
    }
    return std::move(report_);
  }

 private:
  // What is saved again is not left any more, and what is gone needs no note.
  void note_saved(const std::set<std::string>& standing_ones) {
    const auto store = directory_store(run_);
    const LeftLine before = read_left(*store);
    left_ = before;
    left_.erase(run_checkpoint_name(saved_.step, saved_.unsharded));
    std::erase_if(left_, [&](const auto& noted) { return !standing_ones.contains(noted.first); });
    if (left_ != before) write_left(*store, left_);
  }

  void warn_of_later(const StepDirectory& one) {
    if (is_left(left_, run_, one.directory)) return;
    report_.warnings.push_back(one.directory +
                               " is of a later step than the one just saved: it stays, and is the "
                               "latest one if it is whole");
  }

  // Keeps the checkpoint, or removes it.
  void settle(const StepDirectory& one) {
    if (one.step == saved_.step && one.unsharded == saved_.unsharded) return;
    const Location where = directory_in(run_, one.directory);
    if (marker_in(*directory_store(where)).empty()) {
      if (one.step < saved_.step) remove_left(one);
    } else if (!takes_place(one, where)) {
      remove(one);
    }
  }

  // Whether it is kept. One that cannot be judged now takes none of the places.
  bool takes_place(const StepDirectory& one, const Location& where) {
    if (kept_ != nullptr) return kept_->contains(run_checkpoint_name(one.step, one.unsharded));
    if (!lists_.has_place(one.step, one.unsharded)) return false;
    try {
      if (fault_of(where, retention_.check)) return false;
      lists_.count(one.step, one.unsharded);
    } catch (const Error& error) {
      if (error.code() == ErrorCode::cancelled) throw;
      report_.warnings.push_back(one.directory + kUnjudged + error.what());
    }
    return true;
  }

  // What a replacement or a save left beside a checkpoint. One of the step that was saved may be
  // what another save of that step writes just now.
  void remove_aside(const StepDirectory& one) {
    if (one.role == Role::replaced || one.step < saved_.step) remove_left(one);
  }

  // On disk a writer that lives holds a lock. In a store there is none: a run saves one step after
  // the other, so nobody writes to an earlier one.
  void remove_left(const StepDirectory& one) {
    if (!is_on_disk(run_)) {
      remove(one);
      return;
    }
    const std::string path = directory_in(run_, one.directory).path;
    remove_abandoned(path);
    std::error_code unknown;
    if (!fs::exists(path, unknown)) report_.removed.push_back(one.directory);
  }

  void remove(const StepDirectory& one) {
    const Location where = directory_in(run_, one.directory);
    // A power cut must not leave a marker and take the rest.
    remove_markers_first(*directory_store(where), [&] {
      if (is_on_disk(where)) sync_directory(where.path);
    });
    if (is_on_disk(where)) remove_directory(where.path);
    report_.removed.push_back(one.directory);
  }

  const Location& run_;
  const RunCheckpoint& saved_;
  const Retention& retention_;
  Lists lists_;
  const Kept* kept_;
  LeftLine left_;
  RetentionReport report_;
};

RetentionReport retain_verified(const Location& run, const RunCheckpoint& saved,
                                const Retention& retention, const Kept* kept = nullptr) {
  if (retention.link && is_on_disk(run)) link_latest(located_directory(run).path, saved);
  return Retainer(run, saved, retention, kept).retain();
}

// All ranks decide, where each disk has a part. What cannot be judged stays.
Kept kept_by_all(const Location& run, const RunCheckpoint& saved, const Retention& retention,
                 Group& group, std::vector<std::string>& warnings) {
  Kept kept;
  Lists lists(saved, retention);
  for (const SeenStep& one : seen_steps(run, group)) {
    const bool is_saved = one.step == saved.step && one.unsharded == saved.unsharded;
    if (is_saved || one.step > saved.step || !lists.has_place(one.step, one.unsharded)) continue;
    const std::string name = run_checkpoint_name(one.step, one.unsharded);
    try {
      if (judge(one.where, retention.check, group).fault) continue;
      lists.count(one.step, one.unsharded);
    } catch (const Error& error) {
      const bool is_of_all = !error.peers().empty();  // the group is not broken
      if (!is_of_all || error.code() == ErrorCode::cancelled) throw;
      warnings.push_back(name + kUnjudged + error.what());
    }
    kept.insert(name);
  }
  return kept;
}

// Whether this rank removes on its disk: of those whose files are there it is the lowest.
bool removes(const RunCheckpoint& saved, bool is_on_nodes, const Group& group) {
  if (!is_on_nodes) return group.rank() == 0;
  return lowest_rank_in(*directory_store(saved.where), group.size()) == group.rank();
}

// Ranks that share a disk have removed the same.
void join_reports(RetentionReport& all, const RetentionReport& more) {
  for (const std::string& name : more.removed) {
    if (std::ranges::find(all.removed, name) == all.removed.end()) all.removed.push_back(name);
  }
  all.warnings.insert(all.warnings.end(), more.warnings.begin(), more.warnings.end());
}

}  // namespace

auto fields(FieldsOf<RetentionReport> auto& report) {
  return std::tie(report.removed, report.warnings);
}

RetentionReport retain(const Location& run, const RunCheckpoint& saved,
                       const Retention& retention) {
  await_saves(run, Looks::at_run, retention.check.stop);
  require_whole(saved, retention.check);
  return retain_verified(run, saved, retention);
}

RetentionReport retain(const Location& run, const RunCheckpoint& saved, const Retention& retention,
                       Group& group) {
  constexpr const char* kOperation = "removing old checkpoints";
  const Purpose purpose(kOperation);
  await_saves(run, Looks::at_run, retention.check.stop);
  Judgement judgement = judge(saved.where, retention.check, group);
  if (judgement.fault) throw judgement.fault->while_doing(kVerifying);
  std::vector<std::string> warnings;
  Kept kept;
  if (judgement.is_on_nodes) kept = kept_by_all(run, saved, retention, group, warnings);
  RetentionReport own;
  agree_on_long_work(group, kOperation, retention.check.stop, [&](const std::stop_token& stop) {
    if (!removes(saved, judgement.is_on_nodes, group)) return;
    Retention until = retention;
    until.check.stop = stop;
    own = retain_verified(run, saved, until, judgement.is_on_nodes ? &kept : nullptr);
    if (group.rank() > 0) own.warnings.clear();  // rank 0 has the run's notes
  });
  auto report = from_message<RetentionReport>(
      confer(group, kOperation, conference_of([&] { return own; }, join_reports, std::identity())));
  report.warnings.insert(report.warnings.end(), warnings.begin(), warnings.end());
  return report;
}

}  // namespace tessera
