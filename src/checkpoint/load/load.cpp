// Loading by N ranks:
//   1. every rank opens the checkpoint, matches its tree's leaves with it (checkpoint-rows P-16)
//   and proves that the
//      memory is there which its tree speaks of; all agree;
//   2. every rank reads its own pieces, from whatever layout there is (checkpoint-rows P-17); all
//   agree.
// Nothing is written into the tree's memory before 1 has succeeded on every rank.
#include <algorithm>
#include <optional>
#include <set>

#include "base/parallel.h"
#include "base/stop.h"
#include "checkpoint/load/fill.h"
#include "checkpoint/load/fresh.h"
#include "checkpoint/read/castable.h"
#include "checkpoint/read/memory.h"
#include "checkpoint/tree/tree.h"
#include "comm/long_work.h"
#include "comm/whereabouts.h"
#include "tessera/checkpoint.h"
#include "tessera/error.h"
#include "value/children.h"

namespace tessera {
namespace {

// What one rank's load will do.
struct Plan {
  std::string path;  // of the checkpoint
  std::vector<Filling> fillings;
  Owners owners;
  std::vector<std::pair<Path, Value>> values;  // to be put into the tree at the end
  std::vector<std::string> missing;
};

void require_match(const Tensor& want, const Value& found, const LoadOptions& options) {
  if (!found.is(Value::Kind::tensor)) {
    throw Error(ErrorCode::mismatch, "the checkpoint has a value here, expected a tensor");
  }
  const Tensor& have = found.as_tensor();
  if (want.shape != have.shape) {
    throw Error(ErrorCode::mismatch, "the checkpoint's shape is " + to_string(have.shape) +
                                         ", expected " + to_string(want.shape));
  }
  require_castable(have.dtype, want.dtype, options.allow_cast, options.allow_wrap);
}

std::set<std::string_view> names_of(const std::vector<Leaf>& leaves) {
  std::set<std::string_view> names;
  for (const Leaf& leaf : leaves) names.insert(leaf.name);
  return names;
}

// The leaves of the tree by the rule that fits the checkpoint: files from before torch 2.4 keep
// containers without tensors in one item (checkpoint-rows P-11).
std::vector<Leaf> leaves_for(const Value& tree, const Checkpoint& checkpoint) {
  const std::set<std::string_view> names = names_of(checkpoint.leaves);
  std::vector<Leaf> current = flatten(tree);
  const bool complete = std::all_of(current.begin(), current.end(),
                                    [&](const Leaf& leaf) { return names.contains(leaf.name); });
  if (complete) return current;
  const std::set<std::string_view> known = names_of(current);
  std::vector<Leaf> old = flatten(tree, FlattenRule::before_2_4);
  const bool fits = std::any_of(old.begin(), old.end(), [&](const Leaf& leaf) {
    return names.contains(leaf.name) && !known.contains(leaf.name);
  });
  return fits ? old : current;
}

void plan_leaf(const Leaf& wanted, const Value& found, FreshMemory& fresh, Plan& plan,
               const LoadOptions& options) {
  try {
    if (wanted.value.is(Value::Kind::tensor)) {
      require_writable(wanted.value.as_tensor(), wanted.name);
      require_match(wanted.value.as_tensor(), found, options);
      plan.fillings.push_back({wanted.name, wanted.value, found});
    } else {
      plan.values.emplace_back(wanted.path, fresh.of(found));
    }
  } catch (Error& error) {
    throw error.at_key(wanted.name).at_path(plan.path);
  }
}

Plan plan_of(const Value& tree, const Checkpoint& checkpoint, const LoadOptions& options) {
  Plan plan;
  plan.path = checkpoint.path;
  FreshMemory fresh(checkpoint.leaves);
  for (const Leaf& leaf : leaves_for(tree, checkpoint)) {
    if (const Leaf* found = checkpoint.find(leaf.name)) {
      plan_leaf(leaf, found->value, fresh, plan, options);
    } else if (options.allow_missing) {
      plan.missing.push_back(leaf.name);
    } else {
      throw Error(ErrorCode::not_found, "the checkpoint has no such key")
          .at_key(leaf.name)
          .at_path(plan.path);
    }
  }
  for (Filling& filling : fresh.take()) plan.fillings.push_back(std::move(filling));
  plan.owners = owners_of(plan.fillings);
  std::sort(plan.missing.begin(), plan.missing.end());
  return plan;
}

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

}  // namespace

LoadReport load(Value& tree, const Location& where, const LoadOptions& options, Group& group) {
  const Purpose purpose("loading a checkpoint");
  std::optional<Checkpoint> checkpoint;
  agree(group, "opening a checkpoint", [&] {
    require_going_on(options.stop);
    require_threads(options.threads);
    checkpoint = Checkpoint::open(where);
  });
  return load(tree, *checkpoint, options, group);
}

LoadReport load(Value& tree, const Checkpoint& checkpoint, const LoadOptions& options,
                Group& group) {
  const Purpose purpose("loading a checkpoint");
  Plan plan;
  agree(group, "planning a load", [&] {
    require_going_on(options.stop);
    require_threads(options.threads);
    plan = plan_of(tree, checkpoint, options);
  });
  IoCounters counters;
  std::optional<Meter> meter;
  agree_on_long_work(group, "reading a checkpoint", options.stop, [&](const std::stop_token& stop) {
    meter.emplace(options.progress, bytes_of(plan.fillings), stop);
    fill_all({plan.fillings, plan.owners, options.threads, nullptr, counters, *meter});
  });
  for (const auto& [place, value] : plan.values) assign(tree, place, value);
  meter->finish();
  LoadReport report;
  static_cast<IoReport&>(report) = counters.report();
  report.missing = std::move(plan.missing);
  return report;
}

LoadReport load(Value& tree, const Location& where, const LoadOptions& options) {
  return load(tree, where, options, *solo_group());
}

LoadReport load(Value& tree, const Location& where, Group& group) {
  return load(tree, where, {}, group);
}

Value Checkpoint::load(const LoadOptions& options) const {
  require_going_on(options.stop);
  require_threads(options.threads);
  FreshMemory fresh(leaves);
  Value tree = fresh.of(shared_tree(*this));
  const std::vector<Filling> fillings = fresh.take();
  IoCounters counters;
  StorageChecks checks;
  Meter meter(options.progress, bytes_of(fillings), options.stop);
  fill_all({fillings, owners_of(fillings), options.threads, &checks, counters, meter});
  checks.read_rest(options.threads, options.stop);
  meter.finish();
  return tree;
}

}  // namespace tessera
