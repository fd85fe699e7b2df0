// A training state as the OLMo kinds divide it: the model, its optimizer, the trainer
// (checkpoint-rows F-00, F-02).
#pragma once

#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/save_options.h"
#include "tessera/storage.h"
#include "tessera/value.h"

namespace tessera {

struct OlmoState {
  Value model;                 // ordered dict: name -> tensor
  std::optional<Value> optim;  // {"state": {name: {key: value}}, "param_groups": [...]}
  std::optional<Value> train;  // dict
  // {"model": ..., "optim": ..., "train": ...} of the parts that are there.
  [[nodiscard]] Value tree() const;
};

enum class OlmoParts : std::uint8_t { model, all };
// Takes a tree apart. One that has no dict "model" but holds tensors is a model alone; a tree whose
// only entry holds a "model" is looked through (the DCP guide's {"app": ...}); entries beside
// "model", "optim" and "train" belong to the trainer, as in a `rank*.pt` (checkpoint-rows O-60).
// Model and optimizer get clean names. Throws `mismatch` when there is no model.
[[nodiscard]] OlmoState olmo_state_of(const Value& tree, OlmoParts parts = OlmoParts::all);

// A model state dict with clean names; itself when they are clean. Throws `conflict` when two names
// become one.
[[nodiscard]] Value clean_model(const Value& model);
// An optimizer state dict whose state and groups go by clean parameter names (checkpoint-rows
// O-42): integer ids are exchanged for the names that `param_names` of their group gives, which
// become clean too. Itself when nothing changes. Throws `mismatch` when ids have no names,
// `corrupt` when the structure is no optimizer's.
[[nodiscard]] Value named_optim(const Value& optim);

// Which parameters share a flat parameter, and what FSDP calls things below its wrappers.

class UnitPlan {
 public:
  // `names` in the model's order, `unit` as in OlmoOptions (not empty). The root comes first, the
  // others in order of their first parameter, a module before those inside it. Throws
  // `invalid_argument` for a malformed expression, `limit` for a name of more than 1024 bytes.
  static UnitPlan by_expression(const std::vector<std::string>& names, const std::string& unit);
  // The units of the local checkpoint in `store`, as its first rank's file lists them. Throws
  // `mismatch` when they do not hold exactly `names`.
  static UnitPlan of_local(const Store& store, const std::vector<std::string>& names);

  // Units that are known, the root first. Throws `mismatch` when they do not hold exactly `names`,
  // `invalid_argument` for a name that is not below its unit's path.
  static UnitPlan of_units(std::vector<FlatUnit> units, bool aligned,
                           const std::vector<std::string>& names);

  [[nodiscard]] const std::vector<FlatUnit>& units() const noexcept { return units_; }
  // Whether the source's flat parameters were aligned; by_expression: true.
  [[nodiscard]] bool aligned() const noexcept { return aligned_; }
  // `path` of a module or parameter as named_modules and named_parameters of the wrapped model say
  // it: "l1.weight" -> "_fsdp_wrapped_module.l1._fsdp_wrapped_module.weight"; the root's is empty.
  [[nodiscard]] std::string wrapped(const std::string& path) const;

 private:
  std::vector<FlatUnit> units_;
  std::set<std::string> modules_;  // paths of units_ but the root's
  bool aligned_ = true;
};

}  // namespace tessera
