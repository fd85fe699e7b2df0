#include "tessera/run_directory.h"

#include <string>
#include <utility>

#include "base/parallel.h"
#include "checkpoint/open/located.h"
#include "checkpoint/run/judge.h"
#include "checkpoint/run/left_line.h"
#include "checkpoint/run/marker.h"
#include "checkpoint/run/soundness.h"
#include "checkpoint/run/step_names.h"
#include "comm/whereabouts.h"
#include "tessera/error.h"

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
  std::vector<RunCheckpoint> checkpoints;
  for (const StepDirectory& one : marked(run, standing(step_directories(run))))
    checkpoints.push_back({one.step, one.unsharded, directory_in(run, one.directory)});
  return checkpoints;
}

LatestCheckpoint latest_checkpoint(const Location& run, const RunCheck& check) {
  require_threads(check.threads);
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

LatestCheckpoint latest_checkpoint(const Location& run, const RunCheck& check, Group& group) {
  const Purpose purpose("looking for the latest checkpoint");
  if (group.size() == 1) return latest_checkpoint(run, check);
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

}  // namespace tessera
