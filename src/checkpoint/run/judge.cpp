#include "checkpoint/run/judge.h"

#include <algorithm>
#include <functional>
#include <map>
#include <string>
#include <tuple>
#include <utility>

#include "base/process.h"
#include "base/text.h"
#include "checkpoint/load/own_files.h"
#include "checkpoint/open/located.h"
#include "checkpoint/read/side_file.h"
#include "checkpoint/run/steps.h"
#include "comm/confer.h"
#include "comm/long_work.h"
#include "comm/message.h"
#include "tessera/restore.h"

namespace tessera {
namespace {

constexpr const char* kOperation = "verifying a checkpoint of a run";

// What ranks say of their own files: who is the lowest of them, of which save its files are, and
// what is wrong with those of the lowest that has found a fault.
struct Words {
  int rank = 0;
  std::string host;
  std::uint64_t mark = 0;
  std::optional<Error> fault = {};
};

auto fields(FieldsOf<Words> auto& words) {
  return std::tie(words.rank, words.host, words.mark, words.fault);
}

std::string name_of(const Words& words) {
  return rank_on_host(words.rank, words.host);
}

void join_words(Words& all, const Words& more) {
  if (all.fault) return;
  all.fault = more.fault;
  if (!all.fault && all.mark != more.mark) {
    all.fault =
        Error(ErrorCode::mismatch, "the files of " + name_of(more) +
                                       " are of another save than those of " + name_of(all));
  }
}

// The fault, with the rank and host that found it.
Error told_by(const Words& words, const Error& fault) {
  Error told(fault.code(), name_of(words) + ": " + fault.message());
  if (!fault.path().empty()) told.at_path(fault.path());
  if (!fault.key().empty()) told.at_key(fault.key());
  if (fault.offset()) told.at_offset(*fault.offset());
  return told;
}

Words look_at_own(const Location& where, const RunCheck& check, const Group& group) {
  Words own{group.rank(), host_name()};
  const auto fault = own_fault_of(where, check, {group.rank(), group.size()});
  if (fault) {
    own.fault = told_by(own, *fault);
  } else {
    own.mark = save_mark_of(*directory_store(where));
  }
  return own;
}

enum class Found : std::uint8_t { whole, faulty, part };
constexpr Found last_of(Found) {
  return Found::part;
}
// What rank 0 has to say.
using Sight = std::pair<Found, std::optional<Error>>;

// Whether it may be that each node has a part.
bool has_part(const Location& where, const Error& fault, const Group& group) {
  if (group.size() == 1 || fault.code() != ErrorCode::incomplete) return false;
  const auto kind = olmo_kind_at(where);
  if (!kind || !is_one_of(*kind, CheckpointKind::olmo_local, CheckpointKind::olmo_legacy))
    return false;
  try {
    return read_own_files(directory_store(where), {0, group.size()}).has_value();
  } catch (const Error&) {
    return true;  // rank 0 says what is wrong with its own
  }
}

Error no_checkpoint_for(int rank, const Location& where) {
  return Error(ErrorCode::incomplete,
               rank_on_host(rank, host_name()) + ": there is no such checkpoint")
      .at_path(to_string(where));
}

Sight look_at_all(const Location& where, const RunCheck& check, const Group& group) {
  if (marker_in(*directory_store(where)).empty())
    return {Found::faulty, no_checkpoint_for(0, where)};
  const std::optional<Error> fault = fault_of(where, check);
  if (!fault) return {Found::whole, std::nullopt};
  return {has_part(where, *fault, group) ? Found::part : Found::faulty, fault};
}

// After work that may take long.
template <typename Work>
Bytes made_by_long_work(const RunCheck& check, Group& group, const Work& work) {
  Bytes made;
  agree_on_long_work(group, kOperation, check.stop, [&](const std::stop_token& stop) {
    RunCheck until = check;
    until.stop = stop;
    made = work(until);
  });
  return made;
}

using StepKey = std::pair<std::int64_t, bool>;  // step, unsharded
using Steps = std::map<StepKey, bool>;          // whether each is left

// The marked directories in this rank's run. The left one of two names for one step is what
// standing() says.
std::map<StepKey, std::string> marked_directories(const Location& run) {
  std::map<StepKey, std::string> found;
  for (const StepDirectory& one : marked(run, standing(step_directories(run))))
    found.emplace(StepKey(one.step, one.unsharded), one.directory);
  return found;
}

}  // namespace

Judgement judge(const Location& where, const RunCheck& check, Group& group) {
  const Bytes told = group.spread(made_by_long_work(check, group, [&](const RunCheck& until) {
    return group.rank() == 0 ? to_message(look_at_all(where, until, group)) : Bytes();
  }));
  const auto [seen, fault] = from_message<Sight>(told);
  if (seen != Found::part) return {fault};
  const Bytes own = made_by_long_work(check, group, [&](const RunCheck& until) {
    return to_message(look_at_own(where, until, group));
  });
  const Bytes all = confer(group, kOperation,
                           {[&] { return own; }, combine_by<Words>(join_words), std::identity()});
  return {from_message<Words>(all).fault, true};
}

std::vector<SeenStep> seen_steps(const Location& run, Group& group) {
  std::map<StepKey, std::string> own;
  const auto contribute = [&] {
    // A URL shows everybody the same.
    Steps steps;
    if (group.rank() > 0 && !run.store && !is_on_disk(run)) return steps;
    try {
      own = marked_directories(run);
    } catch (const Error&) {
      if (group.rank() == 0) throw;
    }
    for (const auto& [key, directory] : own) steps.emplace(key, false);
    return steps;
  };
  const auto join = [](Steps& all, Steps more) { all.merge(more); };
  const auto conclude = [&](Steps steps) {
    const LeftLine left = read_left(*directory_store(run));
    for (const auto& [key, directory] : own) steps[key] = is_left(left, run, directory);
    return steps;
  };
  const Bytes told = confer(group, "looking for the checkpoints of a run",
                            conference_of(contribute, join, conclude));
  std::vector<SeenStep> seen;
  for (const auto& [key, is_left] : from_message<Steps>(told)) {
    const auto found = own.find(key);
    const std::string directory =
        found != own.end() ? found->second : run_checkpoint_name(key.first, key.second);
    seen.push_back({key.first, key.second, is_left, directory_in(run, directory)});
  }
  std::ranges::sort(seen, {},
                    [](const SeenStep& one) { return std::tuple(-one.step, one.unsharded); });
  return seen;
}

}  // namespace tessera
