#include "optim_state/state_table.h"

#include <algorithm>
#include <map>
#include <unordered_map>
#include <utility>

#include "fsdp/state/sharded_load.h"
#include "optim/optimizer_state.h"
#include "optim_state/state_message.h"
#include "optim_state/tree.h"
#include "tessera/error.h"
#include "value/render.h"

namespace tessera::detail {
namespace {

struct RankState {
  const Value* state = nullptr;  // null: nothing
  int shard_rank = 0;
};
struct Row {
  TableRow row;
  std::vector<RankState> ranks;
};
using RowKey = std::pair<bool, std::vector<std::string>>;  // sharded, names
using Rows = std::map<RowKey, Row>;

// The parts of an optimizer's state, each by its key; valid as long as that is.
class StateByKey {
 public:
  explicit StateByKey(const Value& state) {
    for (const auto& [key, value] : state.pairs()) states_.emplace(state_key(key), &value);
  }
  // Null: nothing.
  [[nodiscard]] const Value* find(const Value& key) const {
    const auto found = states_.find(state_key(key));
    return found == states_.end() ? nullptr : found->second;
  }

 private:
  std::unordered_map<std::string, const Value*> states_;
};

std::vector<std::string> names_in(const Value& list) {
  std::vector<std::string> names;
  for (const auto& name : list.items()) names.push_back(name.as_string());
  return names;
}

std::string text_of(const std::vector<std::string>& names) {
  std::vector<std::string> quoted;
  for (const auto& name : names) quoted.push_back("'" + name + "'");
  return "(" + joined(quoted) + ")";
}

std::string missing_on(std::size_t rank, const Rows& rows) {
  std::vector<std::string> missing;
  for (const auto& [key, row] : rows) {
    if (row.ranks[rank].state == nullptr) missing.push_back(text_of(key.second));
  }
  return joined(missing);
}

// E-17. A flat parameter's state has to be everywhere; so has any other in such a model.
void require_all_described(const Rows& rows, std::size_t world) {
  std::string text;
  for (std::size_t rank = 0; rank < world; ++rank) {
    const auto missing = missing_on(rank, rows);
    if (missing.empty()) continue;
    text += "\nRank " + std::to_string(rank) + " is missing states for the parameters: [" +
            missing + "]";
  }
  if (text.empty()) return;
  throw Error(ErrorCode::mismatch,
              "FSDP currently requires each rank to have at least the optimizer states needed by "
              "rank 0's optimizer but some ranks are missing some of those states" +
                  text);
}

std::int64_t expected_elements(const ModelParam& param, int shard_rank) {
  const auto& unit = *param.unit;
  if (param.is_flat()) return unit.layout().shard_elements;
  return numel(part_of(unit, param.places.front(), shard_rank).slice);
}

std::string shown(const Value& value) {
  if (!value.is(Value::Kind::tensor)) return render(value);
  return "a tensor of " + std::string(to_string(value.as_tensor().dtype)) + " " +
         to_string(value.as_tensor().shape);
}

Error differs(const Row& row, const std::string& name, std::size_t rank, const Value& value,
              const Value& other) {
  return Error(ErrorCode::mismatch, "Rank " + std::to_string(rank) + " has different values for " +
                                        name + ": " + shown(value) +
                                        ". Other ranks: " + shown(other))
      .at_key(row.row.names.front());
}

// `first` is of another rank: what both have of one state has to fit together.
void require_fitting(const Row& row, const std::string& name, std::size_t rank, const Value& value,
                     const Value& first) {
  const bool both = is_shaped(value) && is_shaped(first);
  if (both ? value.as_tensor().dtype == first.as_tensor().dtype : same_value(value, first)) return;
  throw differs(row, name, rank, value, first);
}

void require_size(const Row& row, const std::string& name, std::size_t rank, const Value& value,
                  std::int64_t expected) {
  if (!is_shaped(value) || numel(value.as_tensor().shape) == expected) return;
  throw Error(ErrorCode::mismatch, "Rank " + std::to_string(rank) + " has " +
                                       std::to_string(numel(value.as_tensor().shape)) +
                                       " elements of state " + name + ", expected " +
                                       std::to_string(expected) + ", as many as of the parameter")
      .at_key(row.row.names.front());
}

Error lacks(const Row& row, const std::string& name, std::size_t rank) {
  return Error(ErrorCode::mismatch, "'" + row.row.names.front() +
                                        "' is not in the optimizer state of rank " +
                                        std::to_string(rank) +
                                        ", which holds elements of it, but "
                                        "in that of others: state " +
                                        name)
      .at_key(row.row.names.front());
}

// A part of the parameter that no rank describes would be gathered as zeros.
void require_all_parts(const Row& row) {
  const auto& param = *row.row.param;
  const int world = param.unit->mesh().size();
  for (int shard_rank = 0; shard_rank < world; ++shard_rank) {
    const bool is_described = std::ranges::any_of(
        row.ranks, [&](const RankState& described) { return described.shard_rank == shard_rank; });
    if (!is_described && expected_elements(param, shard_rank) > 0)
      throw lacks(row, "of any name", static_cast<std::size_t>(shard_rank));
  }
}

// A rank that holds elements of a parameter, how many, and how it describes their state.
struct Holder {
  std::size_t rank;
  std::int64_t elements;
  const Value* state;  // null: nothing
};

// Ranks without elements are passed over: an optimizer that made its state early has a step of
// them that does not count on (optimizer-rows R-15).
std::vector<Holder> holders_of(const Row& row) {
  std::vector<Holder> holders;
  for (std::size_t rank = 0; rank < row.ranks.size(); ++rank) {
    const auto& described = row.ranks[rank];
    if (described.shard_rank < 0) continue;
    const auto elements = expected_elements(*row.row.param, described.shard_rank);
    if (elements > 0) holders.push_back({rank, elements, described.state});
  }
  return holders;
}

// The value of each name on the first holder that has it.
std::map<std::string, const Value*> first_values(const std::vector<Holder>& holders) {
  std::map<std::string, const Value*> values;
  for (const auto& holder : holders) {
    if (holder.state == nullptr) continue;
    for (const auto& [key, value] : holder.state->pairs()) values.emplace(key.as_string(), &value);
  }
  return values;
}

void require_on_all(const Row& row, const std::vector<Holder>& holders, const std::string& name,
                    const Value& first) {
  for (const auto& [rank, elements, state] : holders) {
    const auto* value = state == nullptr ? nullptr : state->find(name);
    if (value == nullptr) throw lacks(row, name, rank);
    require_fitting(row, name, rank, *value, first);
    require_size(row, name, rank, *value, elements);
  }
}

// A rank that has all of a parameter may lack a state that others tell of, without elements.
void require_held(const Row& row, const std::vector<Holder>& holders) {
  const auto lacks_all = [](const Holder& holder) { return holder.state == nullptr; };
  if (holders.empty() || !std::ranges::all_of(holders, lacks_all)) return;
  throw lacks(row, "of any name", holders.front().rank);
}

TableEntry table_entry(const std::string& name, const Value& value) {
  if (!is_shaped(value)) return {.name = name, .value = value};
  return {.name = name, .is_tensor = true, .dtype = value.as_tensor().dtype};
}

void join(Row& row) {
  const auto holders = holders_of(row);
  require_all_parts(row);
  require_held(row, holders);
  for (const auto& [name, first] : first_values(holders)) {
    require_on_all(row, holders, name, *first);
    row.row.entries.push_back(table_entry(name, *first));
  }
}

// The description of one parameter in describe_state.
Value param_description(const ModelParam& param, const Value& state) {
  const int shard_rank = param.is_sharded() ? param.unit->mesh().rank() : -1;
  return Value::dict({{"names", Value::list(Value::List(param.names.begin(), param.names.end()))},
                      {"sharded", param.is_sharded()},
                      {"rank", shard_rank},
                      {"state", state}});
}

// Without those that no rank has a state of: parameters without gradients, before the first step.
Rows rows_described(const std::vector<Value>& trees) {
  Rows rows;
  for (std::size_t rank = 0; rank < trees.size(); ++rank) {
    for (const auto& [number, described] : trees[rank].pairs()) {
      auto& row = rows[{described.at("sharded").as_bool(), names_in(described.at("names"))}];
      row.ranks.resize(trees.size(), {nullptr, -1});
      row.ranks[rank].shard_rank = static_cast<int>(described.at("rank").as_int());
      const auto& state = described.at("state");
      if (!state.is(Value::Kind::none)) row.ranks[rank].state = &state;
    }
  }
  std::erase_if(rows, [](const auto& entry) {
    return std::ranges::all_of(
        entry.second.ranks, [](const RankState& described) { return described.state == nullptr; });
  });
  return rows;
}

// Null: no rank has a state of it.
TableRow* row_of(const ModelParam& param, Rows& rows) {
  const auto row = rows.find({param.is_sharded(), param.names});
  return row == rows.end() ? nullptr : &row->second.row;
}

void add_own_state(const Value& state, const std::vector<OptimKey>& keys, Rows& rows) {
  const StateByKey states(state);
  for (const auto& [key, param] : keys) {
    auto* row = row_of(*param, rows);
    if (row == nullptr) continue;
    row->param = param;
    if (const auto* mine = states.find(key)) row->mine = *mine;
  }
}

// A unit that this rank's optimizer does not have may still be gathered by its peers.
void add_model_params(const OptimModel& model, Rows& rows) {
  for (const auto& param : model.params()) {
    auto* row = row_of(param, rows);
    if (row != nullptr && row->param == nullptr) row->param = &param;
  }
}

}  // namespace

Value describe_state(const Value& state, const std::vector<OptimKey>& keys) {
  const StateByKey states(state);
  // Dicts all the way: of tensors in lists all data would travel.
  std::vector<Value::Pair> described;
  for (const auto& [key, param] : keys) {
    const auto* mine = states.find(key);
    // A sharded parameter is described also where nothing is known of its state: the others have to
    // know which part is this rank's.
    if (mine == nullptr && !param->is_sharded()) continue;
    described.emplace_back(Value(static_cast<std::int64_t>(described.size())),
                           param_description(*param, mine == nullptr ? Value() : *mine));
  }
  return Value::dict(std::move(described));
}

std::vector<TableRow> make_table(const OptimModel& model, const Value& state,
                                 const std::vector<OptimKey>& keys,
                                 const std::vector<Value>& trees) {
  auto rows = rows_described(trees);
  if (model.has_flat()) require_all_described(rows, trees.size());
  add_own_state(state, keys, rows);
  add_model_params(model, rows);
  std::vector<TableRow> table;
  for (auto& [key, row] : rows) {
    row.row.is_sharded = key.first;
    row.row.names = key.second;
    if (row.row.is_sharded && row.row.param != nullptr) join(row);
    table.push_back(std::move(row.row));
  }
  return table;
}

std::vector<std::vector<std::string>> described_order(const Value& tree) {
  std::vector<std::vector<std::string>> order;
  for (const auto& [number, described] : tree.pairs())
    order.push_back(names_in(described.at("names")));
  return order;
}

}  // namespace tessera::detail
