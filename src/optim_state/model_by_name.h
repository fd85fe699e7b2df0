// The state of a model by name, with the options of PyTorch's get_state_dict and set_state_dict
// (checkpoint-rows P-30).
#pragma once

#include <string>
#include <unordered_map>
#include <vector>

#include "fsdp/state/sharded_load.h"
#include "fsdp/state/state_dict.h"
#include "optim_state/optim_model.h"
#include "tessera/pytorch/distributed_state_dict.h"

namespace tessera::detail {

// Collective.
[[nodiscard]] Value model_by_name(ModuleRef model, const DistributedStateDictOptions& options);

// A state that a model is to get: all of it is checked before any of it is set.
class ModelSetter {
 public:
  // `may_be_empty`: then nothing is set. The model, and `state` with its tensors, outlive this.
  // Collective; throws alike on all ranks.
  ModelSetter(ModuleRef model, const Value& state, bool may_be_empty,
              const DistributedStateDictOptions& options);
  // Collective.
  IncompatibleKeys apply();

 private:
  void plan(const Value& state, bool may_be_empty);
  void compare_names(const Value& state);
  void plan_whole(const StateEntry& entry, const Value& given) const;
  void plan_of_first(const Value& state, bool may_be_empty);
  void plan_own(const Value& state, bool may_be_empty);
  void set_whole() const;
  void set_from_first() const;

  const torch::nn::Module& module_;
  const DistributedStateDictOptions& options_;
  OptimModel model_;
  GroupOf group_;
  std::vector<StateEntry> entries_;
  std::unordered_map<std::string, Value> given_;  // by name, of the module's
  bool is_empty_ = false;
  IncompatibleKeys keys_;
  std::optional<ShardedLoad> parts_;
};

}  // namespace tessera::detail
