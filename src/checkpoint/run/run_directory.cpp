#include "tessera/run_directory.h"

#include <algorithm>
#include <utility>

#include "base/parallel.h"
#include "checkpoint/run/left_line.h"
#include "checkpoint/run/marker.h"
#include "checkpoint/run/place.h"
#include "checkpoint/run/soundness.h"
#include "checkpoint/run/step_names.h"
#include "comm/long_work.h"
#include "comm/message.h"
#include "tessera/error.h"

namespace tessera {
namespace {

// A checkpoint of a run, and the name of its directory.
struct Standing {
  RunCheckpoint checkpoint;
  std::string directory;
};

std::vector<Standing> marked_checkpoints(const Location& run) {
  std::vector<Standing> found;
  for (const StepDirectory& one : standing(step_directories(run))) {
    Location where = directory_in(run, one.directory);
    if (marker_in(*directory_store(where)).empty()) continue;
    found.push_back({{one.step, one.unsharded, std::move(where)}, one.directory});
  }
  return found;
}

struct Latest {
  std::optional<Standing> found;
  std::vector<std::string> warnings;
};

std::string and_more(const std::vector<std::string>& texts) {
  return texts.size() == 1 ? texts.front()
                           : texts.front() + " (and " + std::to_string(texts.size() - 1) + " more)";
}

// Why there is no latest one, though there are checkpoints.
[[noreturn]] void refuse(const Latest& latest, bool any_left, const Location& run) {
  const std::string why = and_more(latest.warnings);
  throw Error(any_left ? ErrorCode::conflict : ErrorCode::corrupt,
              (any_left ? "no checkpoint of the run is whole but those that it left: "
                        : "every checkpoint of the run is damaged: ") +
                  why)
      .at_path(to_string(run));
}

Latest look(const Location& run, const RunCheck& check) {
  require_threads(check.threads);
  Latest latest;
  bool any_left = false;
  const LeftLine left = read_left(*directory_store(run));
  for (Standing& one : marked_checkpoints(run)) {
    if (is_left(left, run, one.directory)) {
      any_left = true;
      latest.warnings.push_back(one.directory +
                                " is passed over: the run has gone on from an earlier step");
      continue;
    }
    const std::optional<Error> fault = fault_of(one.checkpoint.where, check);
    if (!fault) {
      latest.found = std::move(one);
      return latest;
    }
    latest.warnings.push_back(one.directory + " is damaged and passed over: " + fault->what());
  }
  if (!latest.warnings.empty()) refuse(latest, any_left, run);
  return latest;
}

Bytes encode(const Latest& latest) {
  MessageWriter message;
  message.texts(latest.warnings);
  if (!latest.found) return message.take();
  const RunCheckpoint& found = latest.found->checkpoint;
  message.count(static_cast<std::uint64_t>(found.step)).count(found.unsharded ? 1 : 0);
  return message.text(latest.found->directory).take();
}

LatestCheckpoint decode(const Location& run, ByteView bytes) {
  MessageReader message(bytes);
  LatestCheckpoint latest;
  latest.warnings = message.texts();
  if (message.at_end()) return latest;
  const auto step = static_cast<std::int64_t>(message.count());
  const bool unsharded = message.count() == 1;
  latest.found = {step, unsharded, directory_in(run, message.text())};
  return latest;
}

}  // namespace

std::vector<RunCheckpoint> run_checkpoints(const Location& run) {
  std::vector<RunCheckpoint> checkpoints;
  for (Standing& one : marked_checkpoints(run)) checkpoints.push_back(std::move(one.checkpoint));
  return checkpoints;
}

LatestCheckpoint latest_checkpoint(const Location& run, const RunCheck& check) {
  Latest latest = look(run, check);
  LatestCheckpoint result{std::nullopt, std::move(latest.warnings)};
  if (latest.found) result.found = std::move(latest.found->checkpoint);
  return result;
}

LatestCheckpoint latest_checkpoint(const Location& run, const RunCheck& check, Group& group) {
  Bytes answer;
  agree_on_long_work(group, "looking for the latest checkpoint", check.stop,
                     [&](const std::stop_token& stop) {
                       if (group.rank() != 0) return;
                       RunCheck until = check;
                       until.stop = stop;
                       answer = encode(look(run, until));
                     });
  return decode(run, group.spread(std::move(answer)));
}

}  // namespace tessera
