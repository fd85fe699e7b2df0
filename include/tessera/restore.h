// A checkpoint of any kind as the state of one training that goes on: under the names that its
// model and its optimizer have now.
//
//   void restore(Value& tree, const LiveNames& live) {  // {"model": ..., "optim": ...}
//     auto found = GroupCheckpoint::open("run/step100", {}, group);
//     found.arrange([&](const Checkpoint& stored) { return as_training_state(stored, live); });
//     found.load(tree);
//   }
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tessera/checkpoint.h"
#include "tessera/error.h"
#include "tessera/parameter_names.h"

namespace [[gnu::visibility("default")]] tessera {

// Which of OLMo's kinds the directory holds, by the names of its files: a node that has its own
// ranks' files alone knows it, too. None: another kind, or no checkpoint. Throws `not_found` where
// there is nothing.
[[nodiscard]] std::optional<CheckpointKind> olmo_kind_at(const Location& where);

// What there is to restore into.
struct LiveNames {
  // Of the model's parameters and buffers. Empty: names stay as they are stored.
  std::vector<std::string> names;
  // The optimizer's groups, with names of parameters in their `params`. None: groups stay as they
  // are stored.
  std::optional<Value> groups;
};

// `stored` with the leaves "model.NAME", "optim.state.NAME.KEY", "optim.param_groups.I.KEY" and
// what else it has. It reads no tensor.
//
// - An optimizer's state that goes by numbers gets the names that `param_names` of its group gives.
// - All names lose their wrappers, and then become those of `live` by the rules: those of the
//   model, of the optimizer's state, and in its groups alike. A leaf that serves several live names
//   comes as often. What no live name asks for keeps its stored name. The optimizer gets names of
//   `live.groups` alone: tied parameters have several in a model, which a rule can tell of.
// - `live.groups` get the settings of the stored ones, see fit_groups().
// - `grad_norm_exp_avg` of an olmo-local optimizer is left out: each rank's own gradients made it.
// - A tree of tensors without "model" is a model; one whose only entry has a "model" is looked
//   through.
//
// Throws `mismatch` when numbers have no names, when a group would lose a parameter, and what
// fit_groups() throws; `conflict` when two names become one, `corrupt` for what is no optimizer's
// state.
[[nodiscard]] Checkpoint as_training_state(const Checkpoint& stored, const LiveNames& live = {},
                                           const NameRules& rules = olmo_name_rules());

// An optimizer's groups with the settings of stored ones. Both are lists of dicts whose `params`
// are names; the result has the order and the `params` of `live`.
//
// - A group is found by the names in it, not by its place.
// - Of one stored group for two live ones (with and without weight decay) both get the settings,
//   and the second a weight_decay of 0.0, which it must have in `live`.
// - The live values of `sharded`, `max_grad_norm`, `max_grad_norm_ratio` and `param_names` stay,
// and
//   so does what the stored group lacks. What only the stored group has comes with it.
//
// Throws `mismatch` for other numbers of groups, or a parameter in another group or in none.
[[nodiscard]] Value fit_groups(const Value& stored, const Value& live);

// What a load does when it fails after it has begun to fill `tree`, and whoever finds only
// afterwards that it must not be used: overwrites every tensor that has memory here, so that nobody
// goes on with a mixture of two states. Floating-point elements become NaN, signed integers their
// least value, unsigned ones their greatest, bools true; types without a NaN get all bits. Returns
// `failure` with a remark about it. Never throws for memory that cannot be written: the remark
// says so. Not collective: every rank that has the failure calls it.
[[nodiscard]] Error spoiled(const Value& tree, const Error& failure);

}  // namespace tessera
