#include "optim_state/save_state.h"

#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <ranges>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "base/log.h"
#include "fsdp/state/sharded_load.h"
#include "fsdp/unit/whole_copies.h"
#include "optim/optimizer_state.h"
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
using UnitRows = std::vector<TableRow*>;
using Pairs = std::vector<Value::Pair>;

class Output {
 public:
  Output(const SaveRequest& request, std::vector<TableRow> table);

  // Moves the data: one state of one unit at a time. Ranks that are not `wanted` serve the others.
  void gather(bool wanted);
  // {name: {state: value}} in PyTorch's order, which for flat parameters is that of `order`.
  [[nodiscard]] Value states(const OptimModel& model, const std::vector<Names>& order) const;

 private:
  void add_local();
  void add_whole(const TableRow& row);
  [[nodiscard]] bool is_cut(const Value& value, const ModelParam* param) const;
  void add_values(const TableRow& row);
  void gather_unit(Unit& unit, const UnitRows& rows, bool wanted);
  void gather_state(Unit& unit, const std::string& name, DType dtype, const UnitRows& rows,
                    bool wanted);
  void add_own_chunks(const Unit& unit, const std::string& name, DType dtype, const UnitRows& rows);
  [[nodiscard]] Tensor gathered_tensor(const ModelParam& param, std::size_t index,
                                       const at::Tensor& all, const Tensor& all_leaf) const;
  [[nodiscard]] std::vector<const TableRow*> in_described_order(
      const std::vector<Names>& order) const;
  [[nodiscard]] std::vector<const TableRow*> in_own_order() const;
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
  if (wanted) add_local();
  for (const auto& [unit, rows] : units_) gather_unit(*unit, rows, wanted);
}

// Adds the states that need no other rank.
void Output::add_local() {
  for (const auto* row : whole_) {
    if (!row->mine.is(Value::Kind::none)) add_whole(*row);
  }
  for (const auto& [unit, rows] : units_) {
    for (const auto* row : rows) add_values(*row);
  }
}

// This rank's chunk of a state that it has whole.
Tensor own_chunk(const Tensor& state, const ModelParam& param) {
  const auto mesh = param.unit->mesh();
  const auto& shape = param.shapes.front();
  const auto box = chunk_of(shape, mesh.size(), mesh.rank());
  const auto rows = tensor_of(state).narrow(0, box.offsets[0], box.sizes[0]).clone();
  return chunk_leaf(rows, shape, box);
}

bool Output::is_cut(const Value& value, const ModelParam* param) const {
  return in_chunks_ && param != nullptr && param->unit != nullptr &&
         value.as_tensor().shape == param->shapes.front();
}

// Adds a state that this rank has whole: of no unit, or of one that shards nothing.
void Output::add_whole(const TableRow& row) {
  auto& entries = entries_[row.names.front()];
  for (const auto& [name, value] : row.mine.pairs()) {
    if (!is_shaped(value)) {
      entries.add_plain(name, value);
    } else if (is_cut(value, row.param)) {
      entries.tensors.emplace_back(name, own_chunk(value.as_tensor(), *row.param));
    } else {
      entries.tensors.emplace_back(name, deep_copy(value));
    }
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

// The rows that have each state of elements, by its name and type.
std::map<std::pair<std::string, DType>, UnitRows> rows_by_state(const UnitRows& rows) {
  std::map<std::pair<std::string, DType>, UnitRows> states;
  for (auto* row : rows) {
    for (const auto& entry : row->entries) {
      if (entry.is_tensor) states[{entry.name, entry.dtype}].push_back(row);
    }
  }
  return states;
}

void Output::gather_unit(Unit& unit, const UnitRows& rows, bool wanted) {
  for (const auto& [state, of] : rows_by_state(rows)) {
    if (in_chunks_ && unit.geometry() == Geometry::rows) {
      add_own_chunks(unit, state.first, state.second, of);
    } else {
      gather_state(unit, state.first, state.second, of, wanted);
    }
  }
}

// Null: this rank has none of that name.
const Value* own_value(const TableRow& row, const std::string& name) {
  return row.mine.is(Value::Kind::none) ? nullptr : row.mine.find(name);
}

// FSDP2 shards as chunks are cut: nothing travels.
void Output::add_own_chunks(const Unit& unit, const std::string& name, DType dtype,
                            const UnitRows& rows) {
  for (const auto* row : rows) {
    const auto& param = *row->param;
    const auto part = part_of(unit, param.places.front(), unit.mesh().rank());
    const auto& box = std::get<Box>(part.slice);
    const auto* value = own_value(*row, name);
    const auto held = value == nullptr ? at::zeros(box.sizes, scalar_type_of(dtype))
                                       : tensor_of(value->as_tensor()).clone();
    entries_[row->names.front()].tensors.emplace_back(
        name, chunk_leaf(held.view(box.sizes), param.shapes.front(), box));
  }
}

// Undefined: there are none.
at::Tensor own_elements(const TableRow& row, const std::string& name) {
  const auto* value = own_value(row, name);
  if (value == nullptr) return {};
  return plain(tensor_of(value->as_tensor())).contiguous().view({-1});
}

// A shard of zeros but for what the rows have.
at::Tensor assembled_shard(const Unit& unit, const std::string& name, DType dtype,
                           const UnitRows& rows) {
  const int rank = unit.mesh().rank();
  auto mine = at::zeros({unit.layout().shard_elements}, scalar_type_of(dtype));
  for (const auto* row : rows) {
    const auto elements = own_elements(*row, name);
    if (!elements.defined()) continue;
    const auto base = part_of(unit, row->param->places.front(), rank).base;
    copy_quietly(mine, base, elements, 0, elements.numel());
  }
  return mine;
}

// This rank's part of the state, laid out as the unit's shard.
at::Tensor own_part(const Unit& unit, const std::string& name, DType dtype, const UnitRows& rows) {
  const auto first = own_elements(*rows.front(), name);
  if (rows.front()->param->is_flat()) return first;
  const bool is_all =
      rows.size() == 1 && first.defined() && first.numel() == unit.layout().shard_elements;
  return is_all ? first : assembled_shard(unit, name, dtype, rows);
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
  const auto leaf = leaf_of(all);
  for (const auto* row : rows) {
    const auto& names = row->param->names;
    for (std::size_t i = 0; i < names.size(); ++i) {
      entries_[names[i]].tensors.emplace_back(name, gathered_tensor(*row->param, i, all, leaf));
    }
  }
}

// `all`: the shards of all ranks; `all_leaf` is the same.
Tensor Output::gathered_tensor(const ModelParam& param, std::size_t index, const at::Tensor& all,
                               const Tensor& all_leaf) const {
  const auto& unit = *param.unit;
  const auto& shape = param.shapes[index];
  const auto place = param.places[index];
  // The shards of a flat parameter end to end are that parameter.
  if (!in_chunks_ && unit.geometry() != Geometry::rows)
    return stretch_of(all_leaf, unit.layout().params[place].gathered_offset, shape);
  const auto mesh = unit.mesh();
  const auto box = in_chunks_ ? chunk_of(shape, mesh.size(), mesh.rank()) : whole(shape);
  auto made = at::empty(box.sizes, all.options());
  redistribute(shape, all, parts_of(unit.layout(), place), made.view({-1}), {box, 0});
  return in_chunks_ ? chunk_leaf(made, shape, box) : leaf_of(made);
}

Value Output::entry_of(const std::string& name, bool is_flat) const {
  const auto& entries = entries_.at(name);
  Pairs pairs;
  const auto append = [&](Pairs some) {
    std::ranges::sort(some, {}, [](const auto& pair) { return pair.first.as_string(); });
    pairs.insert(pairs.end(), some.begin(), some.end());
  };
  if (is_flat) append(entries.tensors);
  if (!is_flat) append(entries.others);
  append(entries.scalars);
  append(is_flat ? entries.others : entries.tensors);
  return Value::dict(std::move(pairs));
}

std::vector<const TableRow*> Output::in_described_order(const std::vector<Names>& order) const {
  std::map<Names, const TableRow*> by_names;
  for (const auto& row : table_) by_names.emplace(row.names, &row);
  std::vector<const TableRow*> rows;
  for (const auto& names : order) {
    if (const auto row = by_names.find(names); row != by_names.end()) rows.push_back(row->second);
  }
  return rows;
}

std::vector<const TableRow*> Output::in_own_order() const {
  auto all = whole_;
  for (const auto& [unit, rows] : units_) all.insert(all.end(), rows.begin(), rows.end());
  return all;
}

Value Output::states(const OptimModel& model, const std::vector<Names>& order) const {
  Pairs states;
  for (const auto* row : model.has_flat() ? in_described_order(order) : in_own_order()) {
    const bool is_flat = row->param != nullptr && row->param->is_flat();
    for (const auto& name : row->names) {
      if (entries_.contains(name)) states.emplace_back(name, entry_of(name, is_flat));
    }
  }
  return Value::dict(std::move(states));
}

// Keys of no parameter: nothing is known of them but that somebody wants to keep them.
void add_user_state(const Value& state, const std::vector<OptimKey>& keys, Value& into) {
  std::unordered_set<std::string> known;
  for (const auto& [key, param] : keys) known.insert(state_key(key));
  for (const auto& [key, value] : state.pairs()) {
    if (known.contains(state_key(key))) continue;
    log_of_all(LogLevel::warning,
               "Found a optim state, " + state_key(key) +
                   ", that FSDP cannot process. FSDP will directly copy everything to "
                   "the returned state_dict.");
    into.set_item(key, deep_copy(value));
  }
}

using ParamsByKey = std::unordered_map<std::string, const ModelParam*>;

const ModelParam& require_listed(const ParamsByKey& params, const Value& key) {
  const auto param = params.find(state_key(key));
  if (param != params.end()) return *param->second;
  throw Error(ErrorCode::mismatch, "Can't find " + state_key(key) +
                                       ": a group of the state "
                                       "lists a parameter that the optimizer does not have")
      .at_key("param_groups");
}

Value groups_by_name(const Value& groups, const std::vector<OptimKey>& keys) {
  ParamsByKey params;
  for (const auto& [key, param] : keys) params.emplace(state_key(key), param);
  return with_params(groups, [&](const Value::List& listed) {
    Value::List names;
    for (const auto& key : listed) {
      const auto& own = require_listed(params, key).names;
      names.insert(names.end(), own.begin(), own.end());
    }
    return names;
  });
}

// A state is by names when no key of it is a number and one is a parameter's name (optimizer-rows
//
bool is_by_name(const Value& state, const OptimizerRef::Names& own_names) {
  std::unordered_set<std::string> names;
  for (const auto& [tensor, name] : own_names) names.insert(name);
  const auto keys = std::views::keys(state.pairs());
  return std::ranges::none_of(keys,
                              [](const Value& key) { return key.is(Value::Kind::integer); }) &&
         std::ranges::any_of(keys, [&](const Value& key) {
           return key.is(Value::Kind::string) && names.contains(key.as_string());
         });
}

// The state of this rank's optimizer.
struct OwnState {
  Value state, groups;
  std::vector<OptimKey> keys;
};

OwnState own_state(const OptimModel& model, const OptimizerRef& optim, const SaveRequest& request) {
  OwnState own;
  const auto tree = request.state ? *request.state : optimizer_state_dict(optim);
  own.state = tree.at("state");
  const auto names = model.own_names();
  const bool is_named = optim.is_named() || is_by_name(own.state, *names);
  own.keys = keys_of(model, is_named ? optim.with_names(names) : optim, request.optim_input);
  if (const auto* given = tree.find("param_groups")) own.groups = groups_by_name(*given, own.keys);
  return own;
}

}  // namespace

Value save_state(const torch::nn::Module& module, const OptimizerRef& optim,
                 const SaveRequest& request) {
  const torch::NoGradGuard no_grad;
  const OptimModel model(module);
  const GroupOf group(request.group, model);
  OwnState own;
  const auto trees = all_trees(group.get(), kGathering, [&] {
    own = own_state(model, optim, request);
    return describe_state(own.state, own.keys);
  });
  const bool wanted = request.in_chunks || !request.rank0_only || group.get().rank() == 0;
  Output output(request, make_table(model, own.state, own.keys, trees));
  output.gather(wanted);
  if (!wanted) return Value::dict();
  auto states = output.states(model, described_order(trees.front()));
  add_user_state(own.state, own.keys, states);
  auto result = Value::dict({{"state", std::move(states)}});
  if (!own.groups.is(Value::Kind::none)) result.set_item("param_groups", std::move(own.groups));
  return result;
}

}  // namespace tessera::detail
