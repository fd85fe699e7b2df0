#include "checkpoint/run/kept_checkpoint.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "base/log.h"
#include "base/text.h"
#include "checkpoint/open/kinds.h"
#include "checkpoint/open/located.h"
#include "checkpoint/open/under_way.h"
#include "checkpoint/run/steps.h"
#include "comm/confer.h"
#include "comm/long_work.h"
#include "comm/message.h"
#include "storage/arena/arenas.h"
#include "storage/storage.h"
#include "tessera/checkpoint.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr const char* kPassedOver = "a snapshot in memory is passed over: ";

// As parts name it; empty: a store of this process, of which no other knows.
std::string name_of_run(const Location& run) {
  return run.store ? "" : kept_place(run.path);
}

// The step that a place is of; none: it lies elsewhere.
std::optional<std::int64_t> step_of(const std::string& place, const std::string& run) {
  if (!is_kept_in(place, run) || place.size() == run.size()) return std::nullopt;
  std::string_view name = place;
  name.remove_prefix(run.size() + (run.ends_with('/') ? 0 : 1));
  const auto step = take_step_name(name);
  return step && name.empty() && !step->unsharded ? std::optional(step->step) : std::nullopt;
}

// Of checkpoints of the run whose trainers have died, on this host, with their steps. A run that
// was removed and made again is another one.
std::vector<std::pair<std::int64_t, KeptPart>> own_parts(const Location& run) {
  std::vector<std::pair<std::int64_t, KeptPart>> found;
  const std::string name = name_of_run(run);
  if (name.empty()) return found;
  for (KeptPart& part : kept_parts()) {
    const auto step = step_of(part.place, name);
    if (step && part.is_step && !part.is_readers && part.run_mark == run_mark(part.place) &&
        !has_trainer(part))
      found.emplace_back(*step, std::move(part));
  }
  return found;
}

// The ranks of a host, and what it has of dead trainers' snapshots, as notices.
struct HostParts {
  std::vector<std::int32_t> ranks;
  std::vector<std::pair<std::int64_t, std::string>> notices;  // with their steps
  std::vector<std::string> faults;                            // of what is none to go on from
};
auto fields(FieldsOf<HostParts> auto& parts) {
  return std::tie(parts.ranks, parts.notices, parts.faults);
}
using PartsByHost = std::map<std::string, HostParts>;

PartsByHost host_parts(const Location& run, int rank) {
  HostParts parts{.ranks = {rank}, .notices = {}, .faults = {}};
  const auto unknown = failure_of([&] {
    for (const auto& one : own_parts(run)) {
      if (const auto fault = failure_of([&] { require_intact(one.second, 0, {}); })) {
        parts.faults.push_back(kPassedOver + std::string(fault->what()));
      } else {
        parts.notices.emplace_back(one.first, notice_text(one.second));
      }
    }
  });
  if (unknown) log(LogLevel::warning, std::string("snapshots in memory: ") + unknown->what());
  return {{notice_host(), std::move(parts)}};
}

// Ranks of one host see the same, or nearly.
void join_parts(PartsByHost& all, const PartsByHost& more) {
  for (const auto& [host, parts] : more) {
    const auto [at, is_first] = all.try_emplace(host, parts);
    if (is_first) continue;
    at->second.ranks.insert(at->second.ranks.end(), parts.ranks.begin(), parts.ranks.end());
    std::ranges::sort(at->second.ranks);
  }
}

// One save, and who has the parts of its ranks.
struct SeenSave {
  std::int64_t step = 0;
  std::uint64_t made = 0;
  std::uint64_t stored = 0;  // the digest of its marker; 0: it is not stored, or nobody knows
  std::string meeting;
  std::map<int, std::vector<std::pair<std::string, KeptPart>>> ranks;  // by rank: host and part
};

// Those of which all ranks' parts are somewhere, the newest first: the same on all ranks.
std::vector<SeenSave> seen_saves(const PartsByHost& hosts) {
  std::map<std::string, SeenSave> saves;
  for (const auto& [host, parts] : hosts) {
    for (const auto& [step, notice] : parts.notices) {
      const auto part = part_from_notice(notice);
      if (!part) continue;
      SeenSave& save = saves[save_name(*part)];
      save.step = step;
      save.made = std::max(save.made, part->made);
      save.stored = std::max(save.stored, part->stored);
      save.meeting = meeting_name(part->writer, part->number);
      save.ranks[part->rank].emplace_back(host, *part);
    }
  }
  std::vector<SeenSave> whole;
  for (auto& [place, save] : saves) {
    if (std::ssize(save.ranks) == save.ranks.begin()->second.front().second.size)
      whole.push_back(std::move(save));
  }
  std::ranges::stable_sort(whole, std::greater<>(),
                           [](const SeenSave& save) { return std::pair(save.step, save.made); });
  return whole;
}

// Where this host has each rank's part from: here, if it is, or else where others may read it.
// Empty: of some rank nowhere.
struct SeenPart {
  KeptPart part;
  bool is_elsewhere = false;
};
std::vector<SeenPart> parts_for(const SeenSave& save, const std::string& host) {
  std::vector<SeenPart> parts;
  for (const auto& [rank, places] : save.ranks) {
    const auto is_here = [&](const auto& place) { return place.first == host; };
    const auto is_open = [](const auto& place) { return !place.second.peer.empty(); };
    auto found = std::ranges::find_if(places, is_here);
    const bool is_elsewhere = found == places.end();
    if (is_elsewhere) found = std::ranges::find_if(places, is_open);
    if (found == places.end()) return {};
    parts.push_back({found->second, is_elsewhere});
  }
  return parts;
}

// Whether all hosts get at all parts.
bool is_in_reach(const SeenSave& save, const PartsByHost& hosts) {
  return std::ranges::none_of(
      hosts, [&](const auto& host) { return parts_for(save, host.first).empty(); });
}

// What this rank looks at of what its host has, since others read that, too.
std::vector<KeptPart> share_of(const SeenSave& save, const std::string& host,
                               const std::vector<std::int32_t>& ranks, int rank) {
  const auto index = std::ranges::find(ranks, rank) - ranks.begin();
  std::vector<KeptPart> here, share;
  for (const auto& [of, places] : save.ranks) {
    for (const auto& [where, part] : places)
      if (where == host) here.push_back(part);
  }
  for (std::size_t i = static_cast<std::size_t>(index); i < here.size(); i += ranks.size())
    share.push_back(here[i]);
  return share;
}

// Where ranks of this host find it, the same on all hosts.
Location place_for(const std::vector<SeenPart>& parts) {
  for (const auto& [part, is_elsewhere] : parts)
    if (is_elsewhere) note_remote(part);
  return Location("arena://" + save_place(parts.front().part));
}

// Throws if the snapshot is not as it was kept.
using LookAt = std::function<Location(const SeenSave& save)>;
// Whether the checkpoint that is stored there is that save.
using IsSame = std::function<bool(const Location& stored, const SeenSave& save)>;

LatestCheckpoint newest_good(const std::vector<SeenSave>& saves, const LatestCheckpoint& stored,
                             const LookAt& look_at, const IsSame& is_same) {
  LatestCheckpoint latest;
  for (const SeenSave& save : saves) {
    if (stored.found && save.step < stored.found->step) break;
    if (stored.found && save.step == stored.found->step && !is_same(stored.found->where, save))
      continue;
    Location where("");
    const auto failure = failure_of([&] { where = look_at(save); });
    if (!failure) {
      latest.found = {.step = save.step, .where = std::move(where)};
      return latest;
    }
    if (failure->code() == ErrorCode::cancelled) throw Error(*failure);
    latest.warnings.push_back(kPassedOver + std::string(failure->what()));
  }
  return latest;
}

bool is_save_at(const Location& stored, const SeenSave& save) {
  std::uint64_t digest = 0;
  if (save.stored != 0) (void)failure_of([&] { digest = marker_digest(*directory_store(stored)); });
  return digest != 0 && digest == save.stored;
}

std::string meeting_of(const std::vector<SeenSave>& saves) {
  return saves.empty() ? "" : saves.front().meeting;
}

std::vector<std::string> faults_of(const PartsByHost& hosts) {
  std::vector<std::string> all;
  for (const auto& [host, parts] : hosts)
    all.insert(all.end(), parts.faults.begin(), parts.faults.end());
  return all;
}

// With what opens it: a tree that this version does not know is none to go on from.
Location opened_place(const std::vector<SeenPart>& parts) {
  Location where = place_for(parts);
  (void)Checkpoint::open(where);
  return where;
}

}  // namespace

KeptChoice kept_choice(const Location& run, const RunCheck& check) {
  const PartsByHost hosts = host_parts(run, 0);
  const auto saves = seen_saves(hosts);
  const auto look_at = [check](const SeenSave& save) {
    const auto parts = parts_for(save, notice_host());
    for (const SeenPart& seen : parts)
      require_intact(seen.part, check.read_data ? check.threads : 0, check.stop);
    return opened_place(parts);
  };
  return {meeting_of(saves), faults_of(hosts), [saves, look_at](const LatestCheckpoint& stored) {
            return newest_good(saves, stored, look_at, is_save_at);
          }};
}

KeptChoice kept_choice(const Location& run, const RunCheck& check, Group& group) {
  static constexpr const char* kOperation = "looking for snapshots in memory";
  const auto hosts = from_message<PartsByHost>(confer(
      group, kOperation,
      conference_of([&] { return host_parts(run, group.rank()); }, join_parts, std::identity())));
  auto saves = seen_saves(hosts);
  std::erase_if(saves, [&](const SeenSave& save) { return !is_in_reach(save, hosts); });
  const std::string host = notice_host();
  const auto look_at = [&group, check, host, ranks = hosts.at(host).ranks](const SeenSave& save) {
    Location where("");
    agree_on_long_work(group, kOperation, check.stop, [&](const std::stop_token& stop) {
      for (const KeptPart& part : share_of(save, host, ranks, group.rank()))
        require_intact(part, check.read_data ? check.threads : 0, stop);
      const auto parts = parts_for(save, host);
      where = group.rank() == 0 ? opened_place(parts) : place_for(parts);
      const bool is_all_here = std::ranges::none_of(parts, &SeenPart::is_elsewhere);
      if (group.rank() > 0 && !is_all_here) (void)open_store(where.path);  // others are in reach
    });
    return where;
  };
  const auto is_same = [&group](const Location& stored, const SeenSave& save) {
    return from_message<bool>(
        group.spread(group.rank() == 0 ? to_message(is_save_at(stored, save)) : Bytes()));
  };
  return {meeting_of(saves), faults_of(hosts),
          [saves, look_at, is_same](const LatestCheckpoint& stored) {
            return newest_good(saves, stored, look_at, is_same);
          }};
}

LatestCheckpoint newest_of(const KeptChoice& kept, const std::function<LatestCheckpoint()>& stored,
                           const std::function<void(const std::string& but)>& await) {
  LatestCheckpoint latest;
  std::optional<Error> failure;
  const auto look = [&](const std::string& but) {
    await(but);
    failure = failure_of([&] { latest = stored(); });
    const bool says_nothing =
        failure && !is_one_of(failure->code(), ErrorCode::corrupt, ErrorCode::conflict);
    if (says_nothing) throw Error(*failure);
  };
  look(kept.meeting);
  LatestCheckpoint found;
  if (!kept.meeting.empty()) {
    found = kept.look(latest);
    if (!found.found) look("");  // nobody goes on from what that writes, and so waits for it
  }
  found.warnings.insert(found.warnings.begin(), kept.faults.begin(), kept.faults.end());
  if (failure && !found.found) throw Error(*failure);
  if (failure) found.warnings.emplace_back(failure->what());
  std::ranges::move(found.warnings, std::back_inserter(latest.warnings));
  if (!found.found) return latest;
  const bool is_stored = latest.found && latest.found->step == found.found->step;
  log_of_all(LogLevel::info, "step " + std::to_string(found.found->step) +
                                 " is taken from the memory of writer processes" +
                                 (is_stored ? ", as it is stored, too" : ""));
  latest.found = std::move(found.found);
  return latest;
}

std::string kept_meeting(const Location& run) {
  std::string found;
  (void)failure_of([&] { found = meeting_of(seen_saves(host_parts(run, 0))); });
  return found;
}

void forget_later(const Location& run, std::int64_t step) {
  std::vector<KeptPart> later;
  const auto failure = failure_of([&] {
    for (const auto& [of, part] : own_parts(run))
      if (of > step) later.push_back(part);
    if (!later.empty()) forget(later);
  });
  if (failure) log(LogLevel::warning, std::string("snapshots in memory: ") + failure->what());
}

}  // namespace tessera
