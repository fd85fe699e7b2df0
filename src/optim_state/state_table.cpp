#include "optim_state/state_table.h"

#include <algorithm>
#include <map>
#include <unordered_map>
#include <utility>

#include "fsdp/state/redistribute.h"
#include "optim/state_key.h"
#include "optim_state/state_message.h"
#include "optim_state/tree.h"
#include "tessera/error.h"
#include "value/render.h"

namespace tessera::detail {
namespace {

struct Told {
  const Value* state = nullptr;  // null: nothing
  int shard_rank = 0;
};
struct Row {
  TableRow row;
  std::vector<Told> ranks;
};
using RowKey = std::pair<bool, std::vector<std::string>>;  // sharded, names
using Rows = std::map<RowKey, Row>;

// Of an optimizer's state, each by its key; valid as long as that is.
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
  std::string text = "(";
  for (const auto& name : names) text += (text.size() > 1 ? ", '" : "'") + name + "'";
  return text + ")";
}

// E-17. A flat parameter's state has to be everywhere; so has any other in such a model.
void require_all_told(const Rows& rows, std::size_t world) {
  std::string text;
  for (std::size_t rank = 0; rank < world; ++rank) {
    std::string missing;
    for (const auto& [key, row] : rows) {
      if (row.ranks[rank].state == nullptr)
        missing += (missing.empty() ? "" : ", ") + text_of(key.second);
    }
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

// A part of the parameter that no rank told of would be gathered as zeros.
void require_all_parts(const Row& row) {
  const auto& param = *row.row.param;
  const int world = param.unit->mesh().size();
  for (int shard_rank = 0; shard_rank < world; ++shard_rank) {
    const bool is_told = std::ranges::any_of(
        row.ranks, [&](const Told& told) { return told.shard_rank == shard_rank; });
    if (!is_told && expected_elements(param, shard_rank) > 0)
      throw lacks(row, "of any name", static_cast<std::size_t>(shard_rank));
  }
}

// Ranks without elements are passed over: an optimizer that made its state early has a step of
// them that does not count on (spec R-15).
void join(Row& row) {
  const auto& param = *row.row.param;
  std::vector<std::size_t> holders;
  std::vector<std::int64_t> expected(row.ranks.size());
  for (std::size_t rank = 0; rank < row.ranks.size(); ++rank) {
    const auto& told = row.ranks[rank];
    if (told.shard_rank >= 0) expected[rank] = expected_elements(param, told.shard_rank);
    if (expected[rank] > 0) holders.push_back(rank);
  }
  require_all_parts(row);
  std::map<std::string, const Value*> joint;
  for (const auto rank : holders) {
    if (row.ranks[rank].state == nullptr) continue;
    for (const auto& [key, value] : row.ranks[rank].state->pairs())
      joint.emplace(key.as_string(), &value);
  }
  for (const auto& [name, first] : joint) {
    for (const auto rank : holders) {
      const auto* state = row.ranks[rank].state;
      const auto* value = state == nullptr ? nullptr : state->find(name);
      if (value == nullptr) throw lacks(row, name, rank);
      require_fitting(row, name, rank, *value, *first);
      require_size(row, name, rank, *value, expected[rank]);
    }
    TableEntry entry{.name = name, .is_tensor = is_shaped(*first)};
    if (entry.is_tensor) {
      entry.dtype = first->as_tensor().dtype;
    } else {
      entry.value = *first;
    }
    row.row.entries.push_back(std::move(entry));
  }
}

}  // namespace

Value describe_state(const Value& state, const std::vector<OptimKey>& keys) {
  const StateByKey states(state);
  // Dicts all the way: of tensors in lists all data would travel.
  std::vector<Value::Pair> told;
  for (const auto& [key, param] : keys) {
    const auto* mine = states.find(key);
    // A sharded parameter is told of also where nothing is known of its state: the others have to
    // know which part is this rank's.
    if (mine == nullptr && !param->is_sharded()) continue;
    Value::List names;
    for (const auto& name : param->names) names.emplace_back(name);
    const int shard_rank = param->is_sharded() ? param->unit->mesh().rank() : -1;
    told.emplace_back(Value(static_cast<std::int64_t>(told.size())),
                      Value::dict({{"names", Value::list(std::move(names))},
                                   {"sharded", param->is_sharded()},
                                   {"rank", shard_rank},
                                   {"state", mine == nullptr ? Value() : *mine}}));
  }
  return Value::dict(std::move(told));
}

std::vector<TableRow> make_table(const OptimModel& model, const Value& state,
                                 const std::vector<OptimKey>& keys,
                                 const std::vector<Value>& trees) {
  Rows rows;
  for (std::size_t rank = 0; rank < trees.size(); ++rank) {
    for (const auto& [number, told] : trees[rank].pairs()) {
      auto& row = rows[{told.at("sharded").as_bool(), names_in(told.at("names"))}];
      row.ranks.resize(trees.size(), {nullptr, -1});
      row.ranks[rank].shard_rank = static_cast<int>(told.at("rank").as_int());
      const auto& told_state = told.at("state");
      if (!told_state.is(Value::Kind::none)) row.ranks[rank].state = &told_state;
    }
  }
  // What no rank has a state of is no row: parameters without gradients, before the first step.
  std::erase_if(rows, [](const auto& entry) {
    return std::ranges::all_of(entry.second.ranks,
                               [](const Told& told) { return told.state == nullptr; });
  });
  if (model.has_flat()) require_all_told(rows, trees.size());

  const StateByKey states(state);
  for (auto& [key, row] : rows) {
    row.row.is_sharded = key.first;
    row.row.names = key.second;
  }
  for (const auto& [key, param] : keys) {
    const auto row = rows.find({param->is_sharded(), param->names});
    if (row == rows.end()) continue;
    row->second.row.param = param;
    if (const auto* mine = states.find(key)) row->second.row.mine = *mine;
  }
  // A unit that this rank's optimizer does not have may still be gathered by its peers.
  for (const auto& param : model.params()) {
    const auto row = rows.find({param.is_sharded(), param.names});
    if (row != rows.end() && row->second.row.param == nullptr) row->second.row.param = &param;
  }
  std::vector<TableRow> table;
  for (auto& [key, row] : rows) {
    if (row.row.is_sharded && row.row.param != nullptr) join(row);
    table.push_back(std::move(row.row));
  }
  return table;
}

std::vector<std::vector<std::string>> told_order(const Value& tree) {
  std::vector<std::vector<std::string>> order;
  for (const auto& [number, told] : tree.pairs()) order.push_back(names_in(told.at("names")));
  return order;
}

}  // namespace tessera::detail
