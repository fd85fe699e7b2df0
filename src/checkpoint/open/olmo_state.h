// A training state as the OLMo kinds divide it: the model, its optimizer, the trainer
// (checkpoint-rows F-00, F-02).
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "tessera/value.h"

namespace tessera {

struct OlmoState {
  Value model;                 // ordered dict: name -> tensor
  std::optional<Value> optim;  // {"state": {name: {key: value}}, "param_groups": [...]}
  std::optional<Value> train;  // dict
  // {"model": ..., "optim": ..., "train": ...} of the parts that are there.
  [[nodiscard]] Value tree() const;
};

// Takes a tree apart. One that has no dict "model" but holds tensors is a model alone; a tree whose
// only entry holds a "model" is looked through (the DCP guide's {"app": ...}); entries beside
// "model", "optim" and "train" belong to the trainer, as in a `rank*.pt` (checkpoint-rows O-60).
// Model and optimizer get clean names. Throws `mismatch` when there is no model.
[[nodiscard]] OlmoState olmo_state_of(const Value& tree);

// A model state dict with clean names; itself when they are clean. Throws `conflict` when two names
// become one.
[[nodiscard]] Value clean_model(const Value& model);
// An optimizer state dict whose state and groups go by clean parameter names (checkpoint-rows
// O-42): integer ids are exchanged for the names that `param_names` of their group gives, which
// become clean too. Itself when nothing changes. Throws `mismatch` when ids have no names,
// `corrupt` when the structure is no optimizer's.
[[nodiscard]] Value named_optim(const Value& optim);

}  // namespace tessera
