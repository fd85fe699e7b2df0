// A training state from files that have less than one: a model alone, an optimizer alone.
#include <algorithm>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "checkpoint/open/tree.h"
#include "comm/confer.h"
#include "optim_state/training_load.h"
#include "optim_state/training_tree.h"
#include "optim_state/tree.h"
#include "tessera/error.h"
#include "tessera/fsdp.h"
#include "tessera/restore.h"
#include "tessera/training_state.h"
#include "value/render.h"

namespace tessera {
namespace {

using detail::kModel;
using detail::kOptim;
using detail::TrainingLoad;

constexpr const char* kGroups = "param_groups";
constexpr const char* kParams = "params";
constexpr const char* kNames = "param_names";

bool any_below(const Checkpoint& checkpoint, const char* key) {
  return !leaves_below(checkpoint, {key}).empty();
}

// `stored` with all that it has below "optim".
Checkpoint as_optimizer(const Checkpoint& stored) {
  return stored.map([](Leaf leaf) -> std::optional<Leaf> {
    leaf.path.insert(leaf.path.begin(), kOptim);
    leaf.name = dotted(leaf.path);
    return leaf;
  });
}

// A parameter that has several names may stand in a group as often: C++'s parameters() names it so.
Value each_once(const Value& numbers) {
  std::set<std::string> seen;
  Value::List once = numbers.items();
  std::erase_if(once, [&](const Value& number) { return !seen.insert(render(number)).second; });
  return Value::list(std::move(once));
}

// A list of numbers or names is one leaf.
void put_list(Checkpoint& stored, const Path& path, const Value& list) {
  std::erase_if(stored.leaves, [&](const Leaf& leaf) { return leaf.path == path; });
  stored.leaves.push_back({dotted(path), path, list});
}

std::string counted(std::size_t number, const char* what) {
  return std::to_string(number) + " " + what + (number == 1 ? "" : "s");
}

// An optimizer's groups as one without flat parameters has them: what is in a flat parameter has
// the order of its unit there, and elsewhere that of the model.
Value groups_in_order(const LiveNames& live, ModuleRef model) {
  const auto parameters = sharded_parameters(model);
  const auto is_flat = [](const ShardedParameter& parameter) { return !parameter.members.empty(); };
  if (std::ranges::none_of(parameters, is_flat)) return *live.groups;
  std::map<std::string, std::size_t> places;
  for (const auto& name : live.names) places.emplace(name, places.size());
  const auto place_of = [&](const Value& name) {
    const auto found = places.find(name.as_string());
    return found == places.end() ? places.size() : found->second;
  };
  return detail::with_params(*live.groups, [&](Value::List names) {
    std::ranges::stable_sort(names, {}, place_of);
    return names;
  });
}

// Parameters that go by numbers are those of `live`, an optimizer's groups, in their order.
void name_parameters(Checkpoint& stored, const Value& live) {
  const Value optim = detail::stored_part(stored, {kOptim});
  const Value* const groups = optim.find(kGroups);
  if (groups == nullptr || !groups->is(Value::Kind::list)) {
    throw Error(ErrorCode::mismatch,
                "this is not the state of an optimizer: it has no list of "
                "groups")
        .at_key(kGroups);
  }
  const auto expect = [](std::size_t found, std::size_t expected, const char* what) {
    if (found == expected) return;
    throw Error(ErrorCode::mismatch, "the file has " + counted(found, what) +
                                         ", the optimizer here " + std::to_string(expected));
  };
  expect(groups->size(), live.size(), "group");
  for (std::size_t i = 0; i < live.size(); ++i) {
    const Value& group = groups->items()[i];
    const Value* const numbers = group.is(Value::Kind::dict) ? group.find(kParams) : nullptr;
    if (numbers == nullptr || !numbers->is(Value::Kind::list) || group.find(kNames) != nullptr)
      continue;
    const Value& names = live.items()[i].at(kParams);
    const Value once = each_once(*numbers);
    expect(once.size(), names.size(), "parameter");
    const Path path{kOptim, kGroups, static_cast<std::int64_t>(i)};
    if (once.size() < numbers->size()) put_list(stored, detail::below(path, kParams), once);
    put_list(stored, detail::below(path, kNames), names);
  }
}

// Those that name_parameters() has added.
std::optional<Leaf> without_names(Leaf leaf) {
  const bool is_theirs = leaf.path.size() == 4 && leaf.path.back() == PathPart(kNames);
  return is_theirs ? std::nullopt : std::optional(std::move(leaf));
}

Value part_of(const Value& tree, const char* key) {
  return Value::dict({{key, tree.at(key)}});
}

void append(LoadReport& all, LoadReport more) {
  for (const auto field :
       {&IoReport::bytes_needed, &IoReport::bytes_read, &IoReport::bytes_unchecked,
        &IoReport::bytes_written, &IoReport::requests, &IoReport::retries, &IoReport::bytes_again})
    all.*field += more.*field;
  std::ranges::move(more.missing, std::back_inserter(all.missing));
  std::ranges::move(more.unfit, std::back_inserter(all.unfit));
  std::ranges::move(more.extra, std::back_inserter(all.extra));
}

void require_one_model(const TrainingState& state, const LoadOptions& options) {
  if (!state.key.empty() || !state.others.empty() || options.rename) {
    throw Error(ErrorCode::unsupported,
                "a key, others or other names where a state comes from files of its parts");
  }
  if (!state.optimizer())
    throw Error(ErrorCode::invalid_argument, "a file of an optimizer for a state without one");
}

}  // namespace

void detail::arrange_model_alone(GroupCheckpoint& checkpoint, const Value& model) {
  const auto& contents = checkpoint.contents();
  const auto is_there = [&](const Value::Pair& one) {
    return contents.find(one.first.as_string()) != nullptr;
  };
  if (any_below(contents, kModel) || any_below(contents, kOptim) ||
      std::ranges::none_of(model.pairs(), is_there))
    return;
  checkpoint.arrange([](const Checkpoint& stored) { return as_training_state(stored, {}, {}); });
}

LoadReport load(TrainingState& state, const StateFiles& files, const LoadOptions& options,
                Group& group) {
  TrainingState parts = state;
  parts.values = parts.rank_values = Value::dict();
  std::vector<TrainingLoad> loads;
  agree(group, "preparing to load a training state", [&] {
    require_one_model(parts, options);
    loads = detail::loads_of(parts, options, group.rank(), group.size());
  });
  const auto live = loads.front().names();
  const auto in_order = groups_in_order(live, state.model());
  auto model = GroupCheckpoint::open(files.model, options, group);
  detail::arrange_model_alone(model, loads.front().model());
  auto optimizer = GroupCheckpoint::open(files.optimizer, options, group);
  optimizer.arrange([&](const Checkpoint& stored) {
    auto named = any_below(stored, kOptim) ? stored : as_optimizer(stored);
    name_parameters(named, in_order);
    return as_training_state(named, live, {}).map(without_names);
  });
  const auto report = detail::load_all(loads, optimizer.contents(), group, [&](Value& tree) {
    auto optim_tree = part_of(tree, kOptim), model_tree = part_of(tree, kModel);
    optimizer.require_fit(optim_tree, options);
    model.require_fit(model_tree, options);
    LoadReport both;
    // What fails now fails on all ranks, in the middle of one or between the two.
    if (const auto failure = failure_of([&] {
          both = optimizer.load(optim_tree, options);
          append(both, model.load(model_tree, options));
        }))
      throw spoiled(Value::dict({{kModel, model_tree.at(kModel)}, {kOptim, optim_tree.at(kOptim)}}),
                    *failure);
    tree.set_item(kOptim, optim_tree.at(kOptim));
    return both;
  });
  state.other_options = parts.other_options;
  return report;
}

}  // namespace tessera
