// What all ranks have of each parameter's optimizer state, and what of it is wrong: found from
// descriptions, by the same rule on every rank, before any data moves (optimizer-rows E-17, E-18,
// E-20, E-22 to E-28, Q-02).
#pragma once

#include <string>
#include <vector>

#include "optim_state/optim_model.h"
#include "tessera/value.h"

namespace tessera::detail {

// One state of a parameter.
struct TableEntry {
  std::string name;
  bool is_tensor = false;  // with dimensions: the ranks hold parts of it
  DType dtype = DType::float32;
  Value value = {};  // unless is_tensor: what those ranks agree on that hold elements
};

// One parameter that an optimizer somewhere has a state of.
struct TableRow {
  std::vector<std::string> names;  // more than one: a flat parameter
  bool is_sharded = false;
  const ModelParam* param = nullptr;  // null: not a parameter of this rank's model
  Value mine;                         // this rank's state, with data; none: it has none
  std::vector<TableEntry> entries;    // by name; of sharded parameters alone
};

// The description that a rank sends the others: of each parameter with a state its names, whether
// it is sharded, this rank's place in the shards, and the state.
[[nodiscard]] Value describe_state(const Value& state, const std::vector<OptimKey>& keys);

// The rows, sorted by names, those that are not sharded first. `trees`: what describe_state gave on
// each rank. Throws `mismatch`, alike on every rank, for what ranks have differently.
[[nodiscard]] std::vector<TableRow> make_table(const OptimModel& model, const Value& state,
                                               const std::vector<OptimKey>& keys,
                                               const std::vector<Value>& trees);

// The names of the parameters that rank 0 describes, in its order.
[[nodiscard]] std::vector<std::vector<std::string>> described_order(const Value& tree);

}  // namespace tessera::detail
