// Trees of state.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <variant>

#include "optim_state/optim_model.h"
#include "tessera/checkpoint.h"
#include "tessera/leaf.h"
#include "tessera/value.h"

namespace tessera::detail {

// The dict, list or tuple anew, of what `make` gives for each of its values; anything else as it
// is.
[[nodiscard]] Value map_children(const Value& tree, const std::function<Value(const Value&)>& make);

// A tree of new containers in which `make` gives what stands for each tensor. Tensors that stand in
// two places are given for twice, so the places share nothing.
[[nodiscard]] Value map_tensors(const Value& tree, const std::function<Value(const Tensor&)>& make);

// A tree that shares nothing with this one: containers are new, tensors have memory of their own
// (optimizer-rows ).
[[nodiscard]] Value deep_copy(const Value& tree);
// The same with all tensors in the host's memory.
[[nodiscard]] Value host_copy(const Value& tree);

// A tree in memory as what a load takes from.
[[nodiscard]] Checkpoint checkpoint_of(const Value& tree);

// Copies of an optimizer's groups whose "params" are what `params_of` gives for those they had.
[[nodiscard]] Value with_params(const Value& groups,
                                const std::function<Value::List(const Value::List&)>& params_of);

// The leaves of `checkpoint` below the dict at `path` as a tree of their own.
[[nodiscard]] Value stored_part(const Checkpoint& checkpoint, const Path& path);

// The order of keys of parameters: numbers come before names.
using KeyOrder = std::variant<std::int64_t, std::string>;
[[nodiscard]] KeyOrder order_of(const Value& key);

// Whether this state has elements like its parameter; a step of no dimensions has not.
[[nodiscard]] inline bool is_shaped(const Value& value) {
  return value.is(Value::Kind::tensor) && !value.as_tensor().shape.empty();
}

// An optimizer's state as one dict: `state.{parameter}.{entry}` and
// `param_groups.{parameter}.{option}` (checkpoint-rows P-30).

// Neither "state" nor "param_groups" is a key of it.
[[nodiscard]] bool has_flat_keys(const Value& state);
// A state by names in that form. Throws `unsupported` for a state that is neither a tensor nor a
// number nor a dict.
[[nodiscard]] Value with_flat_keys(const Value& state);

// A state in that form, by parameter.
class FlatKeys {
 public:
  FlatKeys(const OptimModel& model, const Value& state);
  // The state by names of the optimizer's parameters, in the optimizer's groups. Throws `mismatch`
  // for parameters of one group that have different options.
  [[nodiscard]] Value tree_for(const OptimizerRef& optim) const;

 private:
  void add(const std::string& key, const Value& value);
  [[nodiscard]] Value options_for(const std::vector<std::string>& names) const;

  const OptimModel& model_;
  std::map<std::string, Value> states_, options_;  // by the parameter's first name
};

}  // namespace tessera::detail
