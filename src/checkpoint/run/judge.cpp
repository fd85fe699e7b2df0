#include "checkpoint/run/judge.h"

#include <algorithm>
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

Bytes encode(const Words& words) {
  MessageWriter message;
  message.count(static_cast<std::uint64_t>(words.rank)).text(words.host).number(words.mark);
  if (words.fault) message.rest(encode_error(*words.fault));
  return message.take();
}

Words decode_words(const Bytes& bytes) {
  MessageReader message(bytes);
  Words words;
  words.rank = static_cast<int>(message.count());
  words.host = message.text();
  words.mark = message.number<std::uint64_t>();
  if (!message.at_end()) words.fault = decode_error(message.rest());
  return words;
}

std::string name_of(const Words& words) {
  return rank_on_host(words.rank, words.host);
}

Bytes combine_words(const Bytes& left, const Bytes& right) {
  Words all = decode_words(left);
  const Words more = decode_words(right);
  if (all.fault) return left;
  all.fault = more.fault;
  if (!all.fault && all.mark != more.mark) {
    all.fault =
        Error(ErrorCode::mismatch, "the files of " + name_of(more) +
                                       " are of another save than those of " + name_of(all));
  }
  return encode(all);
}

// By whom it was found.
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

enum class Found : std::uint8_t { whole, faulty, part };

Error no_checkpoint_for(int rank, const Location& where) {
  return Error(ErrorCode::incomplete,
               rank_on_host(rank, host_name()) + ": there is no such checkpoint")
      .at_path(to_string(where));
}

// What rank 0 has to say.
Bytes look_at_all(const Location& where, const RunCheck& check, const Group& group) {
  MessageWriter message;
  if (marker_in(*directory_store(where)).empty())
    return message.number(Found::faulty).rest(encode_error(no_checkpoint_for(0, where))).take();
  const std::optional<Error> fault = fault_of(where, check);
  if (!fault) return message.number(Found::whole).take();
  message.number(has_part(where, *fault, group) ? Found::part : Found::faulty);
  return message.rest(encode_error(*fault)).take();
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

// By this rank's run. The left one of two names for one step is what standing() says.
std::map<StepKey, std::string> marked_directories(const Location& run) {
  std::map<StepKey, std::string> found;
  for (const StepDirectory& one : marked(run, standing(step_directories(run))))
    found.emplace(StepKey(one.step, one.unsharded), one.directory);
  return found;
}

Bytes encode_steps(const std::map<StepKey, bool>& steps) {
  MessageWriter message;
  for (const auto& [key, is_left] : steps) {
    message.count(static_cast<std::uint64_t>(key.first));
    message.count((key.second ? 1U : 0U) + (is_left ? 2U : 0U));
  }
  return message.take();
}

std::map<StepKey, bool> decode_steps(const Bytes& bytes) {
  std::map<StepKey, bool> steps;
  for (MessageReader message(bytes); !message.at_end();) {
    const auto step = static_cast<std::int64_t>(message.count());
    const std::uint64_t flags = message.count();
    steps.emplace(StepKey(step, (flags & 1U) != 0), (flags & 2U) != 0);
  }
  return steps;
}

Bytes join_steps(const Bytes& left, const Bytes& right) {
  std::map<StepKey, bool> all = decode_steps(left);
  all.merge(decode_steps(right));
  return encode_steps(all);
}

}  // namespace

Judgement judge(const Location& where, const RunCheck& check, Group& group) {
  const Bytes told = group.spread(made_by_long_work(check, group, [&](const RunCheck& until) {
    return group.rank() == 0 ? look_at_all(where, until, group) : Bytes();
  }));
  MessageReader message(told);
  const auto seen = message.number<Found>();
  if (seen == Found::whole) return {};
  if (seen == Found::faulty) return {decode_error(message.rest())};
  const Bytes own = made_by_long_work(check, group, [&](const RunCheck& until) {
    return encode(look_at_own(where, until, group));
  });
  const Words all = decode_words(confer(
      group, kOperation, {[&] { return own; }, combine_words, [](Bytes words) { return words; }}));
  return {all.fault, true};
}

std::vector<SeenStep> seen_steps(const Location& run, Group& group) {
  std::map<StepKey, std::string> own;
  const auto contribute = [&] {
    // A URL shows everybody the same.
    if (group.rank() > 0 && !run.store && !is_on_disk(run)) return encode_steps({});
    try {
      own = marked_directories(run);
    } catch (const Error&) {
      if (group.rank() == 0) throw;
    }
    std::map<StepKey, bool> steps;
    for (const auto& [key, directory] : own) steps.emplace(key, false);
    return encode_steps(steps);
  };
  const auto conclude = [&](const Bytes& all) {
    std::map<StepKey, bool> steps = decode_steps(all);
    const LeftLine left = read_left(*directory_store(run));
    for (const auto& [key, directory] : own) steps[key] = is_left(left, run, directory);
    return encode_steps(steps);
  };
  const Bytes told =
      confer(group, "looking for the checkpoints of a run", {contribute, join_steps, conclude});
  std::vector<SeenStep> seen;
  for (const auto& [key, is_left] : decode_steps(told)) {
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
