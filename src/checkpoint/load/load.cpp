#include <algorithm>
#include <memory>
#include <optional>

#include "base/copies.h"
#include "base/log.h"
#include "base/parallel.h"
#include "checkpoint/load/fill.h"
#include "checkpoint/load/load_plan.h"
#include "checkpoint/load/opened.h"
#include "checkpoint/load/tell.h"
#include "checkpoint/open/directory.h"
#include "checkpoint/open/located.h"
#include "checkpoint/open/tree.h"
#include "checkpoint/read/cast.h"
#include "checkpoint/read/memory.h"
#include "checkpoint/read/meter.h"
#include "checkpoint/read/missing.h"
#include "comm/confer.h"
#include "comm/long_work.h"
#include "comm/whereabouts.h"
#include "layout/boxes.h"
#include "tessera/checkpoint.h"
#include "tessera/error.h"
#include "tessera/restore.h"
#include "value/children.h"
#include "value/render.h"

namespace tessera {

// Loading by N ranks:
//   1. rank 0 opens the checkpoint for all (opened.h); each rank matches its tree's leaves with it
//      (checkpoint-rows P-16), proves that the memory is there which its tree speaks of, and opens
//      the files that it will read; all agree, and learn which leaves no rank takes;
//   2. every rank reads its own pieces, from whatever layout there is (checkpoint-rows P-17); all
//      agree. If one fails, all overwrite their pieces with NaN (fill.h).
// Nothing is written into the tree's memory before 1 has succeeded on every rank.

namespace {

Value child_of(const Value& container, const PathPart& part) {
  if (const auto* index = std::get_if<std::int64_t>(&part))
    return container.items().at(static_cast<std::size_t>(*index));
  return *container.find_key(key_of_step(part).value());
}

// Replaces the leaf at `path` of `tree`.
void assign(Value& tree, const Path& path, const Value& value) {
  if (path.empty()) {
    tree = value;
    return;
  }
  Value at = tree;
  for (std::size_t i = 0; i + 1 < path.size(); ++i) at = child_of(at, path[i]);
  if (const auto* index = std::get_if<std::int64_t>(&path.back())) {
    at.items().at(static_cast<std::size_t>(*index)) = value;
  } else {
    at.set_item(key_of_step(path.back()).value(), value);
  }
}

std::vector<std::string> names_at(const Checkpoint& checkpoint,
                                  const std::vector<std::size_t>& leaves) {
  std::vector<std::string> names;
  names.reserve(leaves.size());
  for (const std::size_t at : leaves) names.push_back(checkpoint.leaves[at].name);
  return names;
}

// The leaves that some rank takes.
std::vector<bool> taken_leaves(const Checkpoint& checkpoint, const LoadPlan& plan) {
  std::vector<bool> taken(checkpoint.leaves.size(), true);
  for (const std::size_t leaf : plan.untaken) taken[leaf] = false;
  return taken;
}

std::vector<std::string> taken_names(const Checkpoint& checkpoint, const LoadPlan& plan) {
  const std::vector<bool> taken = taken_leaves(checkpoint, plan);
  std::vector<std::string> names;
  for (std::size_t i = 0; i < taken.size(); ++i) {
    if (taken[i]) names.push_back(checkpoint.leaves[i].name);
  }
  return names;
}

// Throws for differences that the options refuse, or finds out whose memory is whose.
void settle(LoadPlan& plan, const Checkpoint& checkpoint, const LoadOptions& options) {
  const bool refuses = options.missing == OnDifference::refuse;
  if (refuses && plan.differences.has_missing())
    plan.differences.set_left(names_at(checkpoint, plan.untaken));
  if (std::optional<Error> refusal = plan.differences.refusal(options))
    throw refusal->at_path(checkpoint.path);
  plan.owners = owners_of(plan.fillings);
}

// A plan that is known to work on every rank.
LoadPlan agreed_plan(const Value& tree, LoadSource& source, const LoadOptions& options,
                     Group& group) {
  constexpr const char* kOperation = "planning a load";
  const Checkpoint& checkpoint = source.checkpoint();
  const bool refuses_extra = options.extra == OnDifference::refuse;
  LoadPlan plan;
  const auto contribute = [&] {
    require_going_on(options.stop);
    require_threads(options.threads);
    plan = plan_load(tree, source, options);
    source.require_files(options.threads);
    // With extra keys in the list it is told when these are known.
    if (!refuses_extra) settle(plan, checkpoint, options);
    return untaken_message(checkpoint.leaves, plan.untaken, refuses_extra);
  };
  const Bytes all =
      confer(group, kOperation, {contribute, combine_untaken, [](Bytes common) { return common; }});
  plan.untaken = untaken_by_all(all, std::move(plan.untaken));
  plan.differences.set_extra(names_at(checkpoint, plan.untaken));
  if (any_refuses(all)) agree(group, kOperation, [&] { settle(plan, checkpoint, options); });
  return plan;
}

// What a user may have meant to load, too: all ranks say it alike. A dict without its optimizer
// loads well, and trains on with fresh moments.
void tell_of_untaken(const LoadPlan& plan, const Checkpoint& checkpoint) {
  if (plan.untaken.empty()) return;
  constexpr std::size_t kMost = 5;
  const std::vector<std::string> left = names_at(checkpoint, plan.untaken);
  std::string text =
      std::to_string(left.size()) +
      (left.size() == 1 ? " key of the checkpoint was" : " keys of the checkpoint were") +
      " not asked for:";
  for (std::size_t i = 0; i < std::min(left.size(), kMost); ++i)
    text += (i > 0 ? ", " : " ") + printable(left[i], 200);
  if (left.size() > kMost) text += ", ...";
  log_of_all(LogLevel::info, text + " [" + checkpoint.path + "]");
  for (const std::string& note : notes_of_left_ranks(taken_names(checkpoint, plan), left))
    log_of_all(LogLevel::warning, note + " [" + checkpoint.path + "]");
}

// Reads all that belongs to one process, and checks it. Returns the bytes.
std::uint64_t read_all(const std::vector<Filling>& fillings, const LoadOptions& options) {
  IoCounters counters;
  StorageChecks checks;
  Meter meter(options.progress, bytes_of(fillings), options.stop);
  fill_all({fillings, owners_of(fillings), options.threads, &checks, counters, meter});
  checks.read_rest(options.threads, options.stop);
  meter.finish();
  return counters.report().bytes_needed;
}

void fill(const LoadPlan& plan, const LoadSource& source, const LoadOptions& options,
          IoCounters& counters, Group& group) {
  std::optional<Meter> meter;
  const auto tell_progress = [&](const Progress& progress) {
    group.make_progress(progress.done);
    if (options.progress) options.progress(progress);
  };
  if (source.is_told()) {
    const Checkpoint& contents = source.stored();
    const std::vector<bool> taken = source.stored_leaves(taken_leaves(source.checkpoint(), plan));
    meter.emplace(tell_progress, bytes_of(plan.fillings), options.stop);
    StorageChecks checks;  // of own files
    StorageChecks* const own = source.is_told_by_all() ? &checks : nullptr;
    tell_all({source.from(), contents, taken, plan.fillings, plan.owners, counters, *meter, own},
             group);
    agree(group, "reading a checkpoint", [&] {
      checks.read_rest(options.threads, options.stop);
      meter->finish();
    });
    return;
  }
  agree_on_long_work(group, "reading a checkpoint", options.stop, [&](const std::stop_token& stop) {
    meter.emplace(tell_progress, bytes_of(plan.fillings), stop);
    StorageChecks checks;  // of own files, which no other rank reads
    FillJob job{plan.fillings, plan.owners, options.threads, source.is_own() ? &checks : nullptr,
                counters,      *meter};
    job.filled = options.filled;
    try {
      fill_all(job);
      checks.read_rest(options.threads, stop);
    } catch (const Error&) {
      // Bytes of another save do not fit what rank 0 has opened: the other save is the reason.
      if (!stop.stop_requested()) source.require_same_save();
      throw;
    }
    source.require_same_save();
    meter->finish();  // what the hook throws has to reach all ranks
  });
}

LoadReport load_planned(Value& tree, const LoadPlan& plan, const LoadSource& source,
                        const LoadOptions& options, Group& group) {
  await_copies();
  IoCounters counters;
  // Every rank has the failure, so all of them spoil what they hold (fault-rows R19).
  if (const auto failure = failure_of([&] { fill(plan, source, options, counters, group); }))
    throw spoiled(plan.fillings, *failure);
  for (const auto& [place, value] : plan.values) assign(tree, place, value);
  LoadReport report;
  static_cast<IoReport&>(report) = counters.report();
  plan.differences.fill(report);
  return report;
}

LoadReport load_opened(Value& tree, LoadSource& source, const LoadOptions& options, Group& group,
                       const JobLog& log) {
  LoadPlan plan;
  log.phase("plan", [&] {
    plan = agreed_plan(tree, source, options, group);
    return 0;
  });
  LoadReport report;
  log.phase("read", [&] {
    report = load_planned(tree, plan, source, options, group);
    return report.bytes_needed;
  });
  tell_of_untaken(plan, source.checkpoint());
  return report;
}

LoadReport load_from(Value& tree, LoadSource& source, const LoadOptions& options, Group& group) {
  const HeedStop heeding(options.stop);
  const Purpose purpose("loading a checkpoint");
  const JobLog log(options.events, "load", group.rank(), source.checkpoint().path);
  LoadReport report;
  log.phase("all", [&] {
    report = load_opened(tree, source, options, group, log);
    return report.bytes_needed;
  });
  return report;
}

// A store keeps no old versions for readers, so a checkpoint that is replaced while it is loaded is
// `conflict`. The error is that of all ranks, who begin anew with what is there now (fault-rows
// O24). Memory that the first try has filled is filled again, or spoiled by then.
LoadReport load_what_is_there(Value& tree, const Location& where, const LoadOptions& options,
                              Group& group, const JobLog& log) {
  constexpr int kMostTries = 5;
  for (int tries = 1;; ++tries) {
    try {
      std::optional<LoadSource> source;
      log.phase("open", [&] {
        source.emplace(open_for_load(where, options, group));
        return 0;
      });
      return load_opened(tree, *source, options, group, log);
    } catch (const Error& error) {
      const bool is_replaced = error.code() == ErrorCode::conflict && !is_on_disk(where);
      if (!is_replaced || tries == kMostTries) throw;
    }
  }
}

}  // namespace

struct GroupCheckpoint::Opened {
  LoadSource source;
  Group& group;
};

GroupCheckpoint::GroupCheckpoint(std::unique_ptr<Opened> opened) : opened_(std::move(opened)) {}
GroupCheckpoint::GroupCheckpoint(GroupCheckpoint&&) noexcept = default;
GroupCheckpoint& GroupCheckpoint::operator=(GroupCheckpoint&&) noexcept = default;
GroupCheckpoint::~GroupCheckpoint() = default;

GroupCheckpoint GroupCheckpoint::open(const Location& where, const LoadOptions& options,
                                      Group& group) {
  const HeedStop heeding(options.stop);
  const Purpose purpose("opening a checkpoint");
  return GroupCheckpoint(
      std::unique_ptr<Opened>(new Opened{open_for_load(where, options, group), group}));
}

GroupCheckpoint GroupCheckpoint::open(const Location& where, const Value& model,
                                      const LoadOptions& options, Group& group) {
  const HeedStop heeding(options.stop);
  const Purpose purpose("opening a checkpoint");
  return GroupCheckpoint(
      std::unique_ptr<Opened>(new Opened{open_own_or_all(where, model, options, group), group}));
}

bool GroupCheckpoint::is_own() const {
  return opened_->source.is_own();
}

const Checkpoint& GroupCheckpoint::contents() const& {
  return opened_->source.checkpoint();
}

void GroupCheckpoint::arrange(const std::function<Checkpoint(const Checkpoint&)>& fn) {
  constexpr const char* kOperation = "naming what a checkpoint holds";
  const auto contribute = [&] {
    opened_->source.arrange(fn(contents()));
    return untaken_message(contents().leaves, {}, false);
  };
  const auto require_same_names = [&](const Bytes& all) {
    if (!is_own() && names_differ(all))
      throw Error(ErrorCode::mismatch, "ranks want other names for what one checkpoint holds");
    return Bytes();
  };
  confer(opened_->group, kOperation, {contribute, combine_untaken, require_same_names});
}

void GroupCheckpoint::require_fit(const Value& tree, const LoadOptions& options) {
  const HeedStop heeding(options.stop);
  const Purpose purpose("loading a checkpoint");
  static_cast<void>(agreed_plan(tree, opened_->source, options, opened_->group));
}

LoadReport GroupCheckpoint::load(Value& tree, const LoadOptions& options) {
  return load_from(tree, opened_->source, options, opened_->group);
}

LoadReport load(Value& tree, const Location& where, const LoadOptions& options, Group& group) {
  const HeedStop heeding(options.stop);
  const Purpose purpose("loading a checkpoint");
  const JobLog log(options.events, "load", group.rank(), to_string(where));
  LoadReport report;
  log.phase("all", [&] {
    report = load_what_is_there(tree, where, options, group, log);
    return report.bytes_needed;
  });
  return report;
}

LoadReport load(Value& tree, const Checkpoint& checkpoint, const LoadOptions& options,
                Group& group) {
  LoadSource source(checkpoint);
  return load_from(tree, source, options, group);
}

LoadReport load(Value& tree, const Location& where, const LoadOptions& options) {
  return load(tree, where, options, *solo_group());
}

LoadReport load(Value& tree, const Location& where, Group& group) {
  return load(tree, where, {}, group);
}

Value Checkpoint::load(const LoadOptions& options) const {
  const HeedStop heeding(options.stop);
  const JobLog log(options.events, "load", 0, path);
  Value tree;
  log.phase("all", [&] {
    std::vector<Filling> fillings;
    log.phase("plan", [&] {
      require_going_on(options.stop);
      require_threads(options.threads);
      require_files();
      FreshMemory fresh(leaves, options.map);
      tree = fresh.of(shared_tree(*this));
      fillings = fresh.take();
      return 0;
    });
    return log.phase("read", [&] { return read_all(fillings, options); });
  });
  return tree;
}

// Slices of an open checkpoint into the caller's memory.

namespace {

Filling filling_of(const Checkpoint& checkpoint, const ReadRequest& request,
                   const ReadOptions& options) {
  const Tensor& have = checkpoint.tensor(request.name);
  const Slice slice = request.slice.value_or(whole(have.shape));
  try {
    if (request.to.shape() != array_of(slice)) {
      throw Error(ErrorCode::mismatch, "memory of shape " + to_string(request.to.shape()) +
                                           " for " + to_string(slice) + " of a tensor of shape " +
                                           to_string(have.shape));
    }
    require_castable(have.dtype, request.to.dtype(), options.allow_cast, options.allow_wrap);
    Tensor wanted = request.to.tensor();
    wanted.shape = have.shape;
    wanted.pieces[0].slice = slice;
    require_writable(wanted, request.name);
    if (lacks_files(checkpoint)) require_here(wanted, have);
    return {request.name, Value(std::move(wanted)), checkpoint.find(request.name)->value};
  } catch (Error& error) {
    throw error.at_key(request.name).at_path(checkpoint.path);
  }
}

}  // namespace

IoReport Checkpoint::read_many(const std::vector<ReadRequest>& requests,
                               const ReadOptions& options) const {
  require_going_on(options.stop);
  const HeedStop heeding(options.stop);
  require_threads(options.threads);
  std::vector<Filling> fillings;
  fillings.reserve(requests.size());
  for (const ReadRequest& request : requests)
    fillings.push_back(filling_of(*this, request, options));
  const Owners owners = owners_of(fillings);
  const std::uint64_t workers =
      std::min<std::uint64_t>(static_cast<std::uint64_t>(options.threads), fillings.size());
  const std::uint64_t cost =
      fillings.empty() ? kNearRequest : request_cost_of(fillings[0].found.as_tensor());
  const Buffers buffers = buffers_for(options.memory, workers, cost);
  IoCounters counters;
  Meter meter(options.progress, bytes_of(fillings), options.stop);
  // Half a window: elements that are converted are there twice.
  FillJob job{fillings, owners, options.threads,    nullptr,
              counters, meter,  buffers.window / 2, buffers.tile};
  job.shared = options.memory / 4;
  await_copies();
  fill_all(job);
  meter.finish();
  return counters.report();
}

IoReport Checkpoint::read(std::string_view name, const TensorView& to,
                          const ReadOptions& options) const {
  return read_many({{std::string(name), to, std::nullopt}}, options);
}

IoReport Checkpoint::read(std::string_view name, const Slice& slice, const TensorView& to,
                          const ReadOptions& options) const {
  return read_many({{std::string(name), to, slice}}, options);
}

}  // namespace tessera
