// An optimizer's state as one dict: `state.{parameter}.{entry}` and
// `param_groups.{parameter}.{option}` (checkpoint-rows P-30).
#pragma once

#include <map>
#include <string>

#include "optim_state/optim_model.h"

namespace tessera::detail {

// Neither "state" nor "param_groups" is a key of it.
[[nodiscard]] bool has_flat_keys(const Value& state);
// A state by names in that form. Throws `unsupported` for a state that is neither a tensor nor a
// number nor a dict.
[[nodiscard]] Value with_flat_keys(const Value& state);

// A state in that form, by parameter.
class FlatKeys {
 public:
  FlatKeys(const OptimModel& model, const Value& state);
  // What it has of the optimizer's parameters as a state by names, in the optimizer's groups.
  // Throws `mismatch` for parameters of one group that have different options.
  [[nodiscard]] Value tree_for(const OptimizerRef& optim) const;

 private:
  void add(const std::string& key, const Value& value);
  [[nodiscard]] Value options_for(const std::vector<std::string>& names) const;

  const OptimModel& model_;
  std::map<std::string, Value> states_, options_;  // by the parameter's first name
};

}  // namespace tessera::detail
