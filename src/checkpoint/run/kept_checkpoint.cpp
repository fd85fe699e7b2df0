#include "checkpoint/run/kept_checkpoint.h"

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/host_process.h"
#include "base/log.h"
#include "checkpoint/open/kinds.h"
#include "checkpoint/open/located.h"
#include "comm/confer.h"
#include "comm/long_work.h"
#include "comm/message.h"
#include "storage/arena/arenas.h"
#include "storage/storage.h"
#include "tessera/error.h"
#include "tessera/verify.h"

namespace tessera {
namespace {

// As a writer names its places; empty: a store of this process, of which no other knows.
std::string name_of_run(const Location& run) {
  if (run.store) return "";
  std::string name = is_on_disk(run)
                         ? std::filesystem::absolute(without_file_scheme(run.path)).string()
                         : run.path;
  while (name.size() > 1 && name.ends_with('/')) name.pop_back();
  return name;
}

// The step that a place is of; none: it lies elsewhere.
std::optional<std::int64_t> step_of(const std::string& place, const std::string& run) {
  std::string_view name = place;
  if (!name.starts_with(run + "/")) return std::nullopt;
  name.remove_prefix(run.size() + 1);
  const auto step = take_step_name(name);
  return step && name.empty() && !step->unsharded ? std::optional(step->step) : std::nullopt;
}

using Places = std::map<std::int64_t, std::string, std::greater<>>;  // the newest step first

Places places_in(const std::string& run) {
  Places places;
  for (const KeptPart& part : kept_parts()) {
    const auto step = step_of(part.place, run);
    if (step && !has_trainer(part)) places.emplace(*step, part.place);
  }
  return places;
}

}  // namespace

std::optional<RunCheckpoint> kept_checkpoint(const Location& run, const RunCheck& check) {
  const std::string name = name_of_run(run);
  Places places;
  // What nobody asked for by name keeps nobody from what is stored.
  const auto unknown = failure_of([&] {
    if (!name.empty()) places = places_in(name);
  });
  if (unknown) log(LogLevel::warning, std::string("snapshots in memory: ") + unknown->what());
  for (const auto& [step, place] : places) {
    RunCheckpoint found{.step = step, .where = Location("arena://" + place)};
    const auto failure = failure_of([&] {
      VerifyOptions options;
      options.threads = check.threads;
      options.stop = check.stop;
      const VerifyReport report = verify(found.where, options);
      if (!report.findings.empty()) throw Error(report.findings.front().error);
    });
    if (!failure) return found;
    if (failure->code() == ErrorCode::cancelled) throw Error(*failure);
    log(LogLevel::info, "a snapshot in memory is passed over: " + std::string(failure->what()));
  }
  return std::nullopt;
}

std::optional<RunCheckpoint> kept_checkpoint(const Location& run, const RunCheck& check,
                                             Group& group) {
  std::optional<RunCheckpoint> found;
  const auto look = [&](const std::stop_token& stop) {
    RunCheck stopped = check;
    stopped.stop = stop;
    if (group.rank() == 0) found = kept_checkpoint(run, stopped);
  };
  using RanksHost = std::pair<std::uint64_t, bool>;  // of the first rank, and whether all are on it
  const auto join = [](RanksHost& all, const RanksHost& more) {
    all.second = all.second && more.second && all.first == more.first && all.first != 0;
  };
  const auto conclude = [&](const RanksHost& hosts) {
    return found && hosts.second ? std::pair(found->step, found->where.path)
                                 : std::pair(std::int64_t{-1}, std::string());
  };
  const auto conference =
      conference_of([] { return RanksHost(same_host::host_digest(), true); }, join, conclude);
  const auto [step, path] =
      from_message<std::pair<std::int64_t, std::string>>(confer_after_long_work(
          group, check.stop, look, "looking for snapshots in memory", conference));
  if (step < 0) return std::nullopt;
  return RunCheckpoint{.step = step, .where = Location(path)};
}

std::optional<RunCheckpoint> newer_of(std::optional<RunCheckpoint> stored,
                                      std::optional<RunCheckpoint> kept) {
  if (!kept || (stored && stored->step > kept->step)) return stored;
  log_of_all(LogLevel::info,
             "step " + std::to_string(kept->step) +
                 " is taken from the memory of writer processes on this host" +
                 (stored && stored->step == kept->step ? ", as it is stored, too" : ""));
  return kept;
}

}  // namespace tessera
