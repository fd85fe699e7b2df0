#include "optim_state/save_state.h"

#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "base/log.h"
#include "fsdp/state/redistribute.h"
#include "fsdp/unit/quiet_copy.h"
#include "optim/state_key.h"
#include "optim_state/state_message.h"
#include "optim_state/state_table.h"
#include "optim_state/tree.h"
#include "tessera/error.h"
#include "torch/tensor.h"

namespace tessera::detail {
namespace {

constexpr const char* kGathering = "gathering optimizer state";

// The states of one parameter of the module, by what they are.
struct Entries {
  std::vector<Value::Pair> tensors, scalars, others;  // each by name

  // A copy of what has not the parameter's elements.
  void add_plain(const Value& name, const Value& value) {
    (value.is(Value::Kind::tensor) ? scalars : others).emplace_back(name, deep_copy(value));
  }
};
using Names = std::vector<std::string>;

class Output {
 public:
  Output(const SaveRequest& request, std::vector<TableRow> table);

  // Moves the data: one state of one unit at a time. Ranks that are not `wanted` serve the others.
  void gather(bool wanted);
  // {name: {state: value}} in PyTorch's order, which for flat parameters is that of `told`.
  [[nodiscard]] Value states(const OptimModel& model, const std::vector<Names>& told) const;

 private:
  using UnitRows = std::vector<TableRow*>;
  void add_whole(const TableRow& row);
  void add_values(const TableRow& row);
  void gather_unit(Unit& unit, const UnitRows& rows, bool wanted);
  void gather_state(Unit& unit, const std::string& name, DType dtype, const UnitRows& rows,
                    bool wanted);
  void add_own_chunks(const Unit& unit, const std::string& name, DType dtype, const UnitRows& rows);
  [[nodiscard]] Value entry_of(const std::string& name, bool is_flat) const;

  bool in_chunks_;
  std::vector<TableRow> table_;
  std::vector<const TableRow*> whole_;                             // what nobody shards
  std::vector<std::pair<std::shared_ptr<Unit>, UnitRows>> units_;  // by their smallest name
  std::unordered_map<std::string, Entries> entries_;
};

Output::Output(const SaveRequest& request, std::vector<TableRow> table)
    : in_chunks_(request.in_chunks), table_(std::move(table)) {
  std::unordered_map<const Unit*, std::size_t> places;
  for (auto& row : table_) {
    if (!row.is_sharded) {
      whole_.push_back(&row);
      continue;
    }
    if (row.param == nullptr) continue;  // of a unit that this rank does not have
    const auto [place, is_new] = places.emplace(row.param->unit.get(), units_.size());
    if (is_new) units_.push_back({row.param->unit, {}});
    units_[place->second].second.push_back(&row);
  }
}

void Output::gather(bool wanted) {
  for (const auto* row : whole_) {
    if (wanted && !row->mine.is(Value::Kind::none)) add_whole(*row);
  }
  for (const auto& [unit, rows] : units_) {
    for (const auto* row : rows) {
      if (wanted) add_values(*row);
    }
    gather_unit(*unit, rows, wanted);
  }
}

// What this rank has whole: of no unit, or of one that shards nothing.
void Output::add_whole(const TableRow& row) {
  const auto* param = row.param;
  const bool chunks = in_chunks_ && param != nullptr && param->unit != nullptr;
  auto& entries = entries_[row.names.front()];
  for (const auto& [name, value] : row.mine.pairs()) {
    if (!is_shaped(value)) {
      entries.add_plain(name, value);
      continue;
    }
    if (!chunks || value.as_tensor().shape != param->shapes.front()) {
      entries.tensors.emplace_back(name, deep_copy(value));
      continue;
    }
    const auto mesh = param->unit->mesh();
    const auto& shape = param->shapes.front();
    const auto box = chunk_of(shape, mesh.size(), mesh.rank());
    const auto rows = tensor_of(value.as_tensor()).narrow(0, box.offsets[0], box.sizes[0]).clone();
    entries.tensors.emplace_back(name, chunk_leaf(rows, shape, box));
  }
}

void Output::add_values(const TableRow& row) {
  for (const auto& name : row.names) {
    auto& entries = entries_[name];
    for (const auto& entry : row.entries) {
      if (!entry.is_tensor) entries.add_plain(entry.name, entry.value);
    }
  }
}

void Output::gather_unit(Unit& unit, const UnitRows& rows, bool wanted) {
  std::map<std::pair<std::string, DType>, UnitRows> states;
  for (auto* row : rows) {
    for (const auto& entry : row->entries) {
      if (entry.is_tensor) states[{entry.name, entry.dtype}].push_back(row);
    }
  }
  for (const auto& [state, of] : states) {
    if (in_chunks_ && unit.geometry() == Geometry::rows) {
      add_own_chunks(unit, state.first, state.second, of);
    } else {
      gather_state(unit, state.first, state.second, of, wanted);
    }
  }
}

// FSDP2 shards as chunks are cut: nothing travels.
void Output::add_own_chunks(const Unit& unit, const std::string& name, DType dtype,
                            const UnitRows& rows) {
  for (const auto* row : rows) {
    const auto& param = *row->param;
    const auto part = part_of(unit, param.places.front(), unit.mesh().rank());
    const auto& box = std::get<Box>(part.slice);
    const auto* value = row->mine.is(Value::Kind::none) ? nullptr : row->mine.find(name);
    const auto held = value == nullptr ? at::zeros(box.sizes, scalar_type_of(dtype))
                                       : tensor_of(value->as_tensor()).clone();
    entries_[row->names.front()].tensors.emplace_back(
        name, chunk_leaf(held.view(box.sizes), param.shapes.front(), box));
  }
}

// This rank's part of the state, laid out as the unit's shard.
at::Tensor own_part(const Unit& unit, const std::string& name, DType dtype,
                    const std::vector<TableRow*>& rows) {
  const auto held = [&](const TableRow& row) -> at::Tensor {
    const auto* value = row.mine.is(Value::Kind::none) ? nullptr : row.mine.find(name);
    return value == nullptr ? at::Tensor() : tensor_of(value->as_tensor()).contiguous().view({-1});
  };
  if (rows.front()->param->is_flat()) return held(*rows.front());
  if (const auto only = held(*rows.front());
      rows.size() == 1 && only.defined() && only.numel() == unit.layout().shard_elements)
    return only;
  const int rank = unit.mesh().rank();
  auto mine = at::zeros({unit.layout().shard_elements}, scalar_type_of(dtype));
  for (const auto* row : rows) {
    const auto elements = held(*row);
    if (!elements.defined()) continue;
    const auto base = part_of(unit, row->param->places.front(), rank).base;
    copy_quietly(mine, base, elements, 0, elements.numel());
  }
  return mine;
}

// Elements of a one-dimensional tensor as one of `shape`, in the same memory.
Tensor stretch_of(const Tensor& array, std::int64_t from, const Shape& shape) {
  Tensor stretch;
  stretch.dtype = array.dtype;
  stretch.shape = shape;
  stretch.pieces = array.pieces;
  stretch.pieces.front().slice = whole(shape);
  stretch.pieces.front().storage_offset += from;
  return stretch;
}

void Output::gather_state(Unit& unit, const std::string& name, DType dtype, const UnitRows& rows,
                          bool wanted) {
  const auto mine = own_part(unit, name, dtype, rows).to(unit.mesh().device());
  const auto all = unit.whole().exchange(mine).cpu();
  if (!wanted) return;
  const int rank = unit.mesh().rank();
  const auto gathered = leaf_of(all);
  for (const auto* row : rows) {
    const auto& param = *row->param;
    for (std::size_t i = 0; i < param.names.size(); ++i) {
      const auto& shape = param.shapes[i];
      auto& tensors = entries_[param.names[i]].tensors;
      // The shards of a flat parameter end to end are that parameter.
      if (!in_chunks_ && unit.geometry() != Geometry::rows) {
        tensors.emplace_back(
            name,
            stretch_of(gathered, unit.layout().params[param.places[i]].gathered_offset, shape));
        continue;
      }
      const auto box = in_chunks_ ? chunk_of(shape, unit.mesh().size(), rank) : whole(shape);
      auto made = at::empty(box.sizes, all.options());
      redistribute(shape, all, parts_of(unit.layout(), param.places[i]), made.view({-1}), {box, 0});
      tensors.emplace_back(name, in_chunks_ ? chunk_leaf(made, shape, box) : leaf_of(made));
    }
  }
}

Value Output::entry_of(const std::string& name, bool is_flat) const {
  const auto& entries = entries_.at(name);
  std::vector<Value::Pair> pairs;
  const auto append = [&](std::vector<Value::Pair> some) {
    std::ranges::sort(some, {}, [](const auto& pair) { return pair.first.as_string(); });
    pairs.insert(pairs.end(), some.begin(), some.end());
  };
  if (is_flat) append(entries.tensors);
  if (!is_flat) append(entries.others);
  append(entries.scalars);
  append(is_flat ? entries.others : entries.tensors);
  return Value::dict(std::move(pairs));
}

Value Output::states(const OptimModel& model, const std::vector<Names>& told) const {
  std::vector<Value::Pair> states;
  const auto append = [&](const TableRow& row) {
    for (const auto& name : row.names) {
      if (entries_.contains(name))
        states.emplace_back(name, entry_of(name, row.param != nullptr && row.param->is_flat()));
    }
  };
  if (!model.has_flat()) {
    for (const auto* row : whole_) append(*row);
    for (const auto& [unit, rows] : units_) {
      for (const auto* row : rows) append(*row);
    }
    return Value::dict(std::move(states));
  }
  std::map<Names, const TableRow*> by_names;
  for (const auto& row : table_) by_names.emplace(row.names, &row);
  for (const auto& names : told) {
    if (const auto row = by_names.find(names); row != by_names.end()) append(*row->second);
  }
  return Value::dict(std::move(states));
}

// Keys of no parameter: nothing is known of them but that somebody wants to keep them.
void add_user_state(const Value& state, const std::vector<OptimKey>& keys, Value& into) {
  std::unordered_set<std::string> known;
  for (const auto& [key, param] : keys) known.insert(state_key(key));
  for (const auto& [key, value] : state.pairs()) {
    if (known.contains(state_key(key))) continue;
    log(LogLevel::warning, "Found a optim state, " + state_key(key) +
                               ", that FSDP cannot process. FSDP will directly copy everything to "
                               "the returned state_dict.");
    into.set_item(key, deep_copy(value));
  }
}

Value groups_by_name(const Value& groups, const std::vector<OptimKey>& keys) {
  std::unordered_map<std::string, const ModelParam*> params;
  for (const auto& [key, param] : keys) params.emplace(state_key(key), param);
  Value::List made;
  for (const auto& group : groups.items()) {
    Value::List names;
    for (const auto& key : group.at("params").items()) {
      const auto param = params.find(state_key(key));
      if (param == params.end()) {
        throw Error(ErrorCode::mismatch, "Can't find " + state_key(key) +
                                             ": a group of the state "
                                             "lists a parameter that the optimizer does not have")
            .at_key("param_groups");
      }
      for (const auto& name : param->second->names) names.emplace_back(name);
    }
    auto copy = deep_copy(group);
    copy.set_item("params", Value::list(std::move(names)));
    made.push_back(std::move(copy));
  }
  return Value::list(std::move(made));
}

// By names, when no key of it is a number and one is a parameter's name (spec Q-23).
bool is_by_name(const Value& state, const OptimizerRef::Names& own_names) {
  std::unordered_set<std::string> names;
  for (const auto& [tensor, name] : own_names) names.insert(name);
  bool found = false;
  for (const auto& [key, value] : state.pairs()) {
    if (key.is(Value::Kind::integer)) return false;
    found = found || (key.is(Value::Kind::string) && names.contains(key.as_string()));
  }
  return found;
}

}  // namespace

Value save_state(const torch::nn::Module& module, const OptimizerRef& optim,
                 const SaveRequest& request) {
  const torch::NoGradGuard no_grad;
  const OptimModel model(module);
  const GroupOf group(request.group, model);
  Value tree, state, groups;
  std::vector<OptimKey> keys;
  const auto trees = all_trees(group.get(), kGathering, [&] {
    tree = request.state ? *request.state : optimizer_state_dict(optim);
    state = tree.at("state");
    const auto names = model.own_names();
    const bool is_named = optim.is_named() || is_by_name(state, *names);
    keys = keys_of(model, is_named ? optim.with_names(names) : optim, request.optim_input);
    if (const auto* given = tree.find("param_groups")) groups = groups_by_name(*given, keys);
    return describe_state(state, keys);
  });
  const bool wanted = request.in_chunks || !request.rank0_only || group.get().rank() == 0;
  Output output(request, make_table(model, state, keys, trees));
  output.gather(wanted);
  if (!wanted) return Value::dict();
  auto states = output.states(model, told_order(trees.front()));
  add_user_state(state, keys, states);
  auto result = Value::dict({{"state", std::move(states)}});
  if (!groups.is(Value::Kind::none)) result.set_item("param_groups", std::move(groups));
  return result;
}

}  // namespace tessera::detail
