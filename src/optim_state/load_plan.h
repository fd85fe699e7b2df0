// The plan by which states go to parameters when a state by names is loaded, and why it cannot be.
#pragma once

#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "optim_state/optim_model.h"

namespace tessera::detail {

// A state by names, found by every name that a parameter has.
class NamedStates {
 public:
  NamedStates(const OptimModel& model, const Value& state);
  // Null: nothing is there.
  [[nodiscard]] const Value* find(const std::string& name) const;
  // Entries of no parameter of the model.
  [[nodiscard]] const std::vector<Value::Pair>& others() const noexcept { return others_; }

 private:
  std::unordered_map<std::string, const Value*> states_;
  std::vector<Value::Pair> others_;
};

// One state of an optimizer's parameter.
struct LoadEntry {
  std::string name;
  bool is_tensor = false;
  DType dtype = DType::float32;
  std::vector<const Value*> tensors = {};  // of each parameter in it; null: zeros
  Value value = {};                        // unless is_tensor
};

struct LoadItem {
  const ModelParam* param = nullptr;
  std::vector<LoadEntry> entries;  // in the order of the state
};

// In the model's order; parameters of which the state has nothing are left out. Throws `mismatch`
// for what one tensor cannot hold (optimizer-rows E-08, E-09). `in_chunks`: tensors may be parts.
[[nodiscard]] std::vector<LoadItem> plan_load(const OptimModel& model, const NamedStates& states,
                                              bool in_chunks);

}  // namespace tessera::detail
