// What a run keeps of its checkpoints.
#include <array>
#include <filesystem>
#include <set>
#include <utility>

#include "base/random_id.h"
#include "checkpoint/run/left_line.h"
#include "checkpoint/run/marker.h"
#include "checkpoint/run/place.h"
#include "checkpoint/run/soundness.h"
#include "checkpoint/run/step_names.h"
#include "comm/long_work.h"
#include "comm/message.h"
#include "storage/posix/lock.h"
#include "storage/posix/system.h"
#include "tessera/error.h"
#include "tessera/run_directory.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using Role = StepDirectory::Role;

void require_whole(const RunCheckpoint& saved, const RunCheck& check) {
  if (marker_in(*directory_store(saved.where)).empty()) {
    throw Error(ErrorCode::incomplete, "the new checkpoint has neither .metadata nor config.yaml")
        .at_path(to_string(saved.where));
  }
  if (std::optional<Error> fault = fault_of(saved.where, check))
    throw fault->while_doing("verifying the new checkpoint before older ones are removed");
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

// Goes through the directories of a run, each by itself, the newest first.
class Retainer {
 public:
  Retainer(const Location& run, const RunCheckpoint& saved, const Retention& retention)
      : run_(run), saved_(saved), retention_(retention) {
    ++kept_[list_of(saved.step, saved.unsharded)];
  }

  RetentionReport retain() {
    const std::vector<StepDirectory> all = step_directories(run_);
    std::set<std::string> standing_ones;
    for (const StepDirectory& one : standing(all)) standing_ones.insert(one.directory);
    note_saved(standing_ones);
    for (const StepDirectory& one : all) {
      const bool stands = standing_ones.contains(one.directory);
      if (one.step > saved_.step) {
        if (stands) warn_of_later(one);
      } else if (limit_of(one) >= 0) {
        stands ? settle(one) : remove_aside(one);
      }
    }
    return std::move(report_);
  }

 private:
  // Positions in the tables of lists.
  static constexpr std::size_t kSharded = 0, kUnsharded = 1, kEphemeral = 2;

  [[nodiscard]] std::size_t list_of(std::int64_t step, bool unsharded) const {
    if (unsharded) return kUnsharded;
    return retention_.is_ephemeral && retention_.is_ephemeral(step) ? kEphemeral : kSharded;
  }
  [[nodiscard]] std::int64_t limit_of(const StepDirectory& one) const {
    const std::array limits{retention_.sharded, retention_.unsharded, retention_.ephemeral};
    return limits[list_of(one.step, one.unsharded)];
  }

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
    std::int64_t& kept = kept_[list_of(one.step, one.unsharded)];
    if (kept >= limit_of(one)) return false;
    try {
      if (fault_of(where, retention_.check)) return false;
      ++kept;
    } catch (const Error& error) {
      if (error.code() == ErrorCode::cancelled) throw;
      report_.warnings.push_back(one.directory + " stays, it cannot be judged: " + error.what());
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
    if (run_.store) {
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
      if (!where.store) sync_directory(where.path);
    });
    if (!where.store) remove_directory(where.path);
    report_.removed.push_back(one.directory);
  }

  const Location& run_;
  const RunCheckpoint& saved_;
  const Retention& retention_;
  LeftLine left_;
  std::array<std::int64_t, 3> kept_{};  // by list
  RetentionReport report_;
};

}  // namespace

RetentionReport retain(const Location& run, const RunCheckpoint& saved,
                       const Retention& retention) {
  require_whole(saved, retention.check);
  if (retention.link && !run.store) link_latest(run.path, saved);
  return Retainer(run, saved, retention).retain();
}

RetentionReport retain(const Location& run, const RunCheckpoint& saved, const Retention& retention,
                       Group& group) {
  MessageWriter message;
  agree_on_long_work(group, "removing old checkpoints", retention.check.stop,
                     [&](const std::stop_token& stop) {
                       if (group.rank() != 0) return;
                       Retention until = retention;
                       until.check.stop = stop;
                       const RetentionReport report = retain(run, saved, until);
                       message.texts(report.removed).texts(report.warnings);
                     });
  const Bytes told = group.spread(message.take());
  MessageReader reader(told);
  RetentionReport report;
  report.removed = reader.texts();
  report.warnings = reader.texts();
  return report;
}

}  // namespace tessera
