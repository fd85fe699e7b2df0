// A checkpoint of any kind as the state of one training that goes on: under the names that its
// model and its optimizer have now.
//
//   void restore(Value& tree, const LiveNames& live) {  // {"model": ..., "optim": ...}
//     auto found = GroupCheckpoint::open("run/step100", {}, group);
//     found.arrange([&](const Checkpoint& stored) { return as_training_state(stored, live); });
//     found.load(tree);
//   }
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/checkpoint.h"
#include "tessera/error.h"

namespace [[gnu::visibility("default")]] tessera {

// Names of parameters that changed between two versions of a model, as rules that callers extend:
// how the name that a checkpoint has for a parameter leads to the one that a model has now.

// A parameter that was renamed, or several that were made of one.
struct NameRule {
  // What a checkpoint calls it. One `*` at most, which stands for any text, dots too.
  std::string stored;
  // What a model calls it, or each of them. The text of `*` is put into theirs.
  std::vector<std::string> live;
};

// Blocks stand in one list, as `list.N.REST`, or in groups of some size, as `groups.G.I.REST`,
// where N is G times the size, and I. The size is taken from the names.
struct BlockRule {
  std::string list;
  std::string groups;
};

struct NameRules {
  std::vector<std::string> wrappers;  // text that is removed from names, wherever it stands
  std::vector<BlockRule> blocks;
  std::vector<NameRule> renamed;
};

// What OLMo does when it restores: it removes "_fsdp_wrapped_module." (so a name that only ends in
// the word keeps it), makes `attn_norm` and `ff_norm` of a block's `norm`, and finds
// "transformer.blocks" in "transformer.block_groups" and the other way round.
[[nodiscard]] NameRules olmo_name_rules();

// `name` without the wrappers.
[[nodiscard]] std::string without_wrappers(std::string name, const NameRules& rules);

// The stored name for each live one that has one: the same name, or else that of another grouping
// of blocks, or else what the first rule that fits leads to. One stored name may serve several live
// ones. Both are compared without wrappers; the result has the names as they were given. Throws
// `conflict` for two stored names that become one, `invalid_argument` for a rule with several `*`.
[[nodiscard]] std::map<std::string, std::string> match_names(const std::vector<std::string>& stored,
                                                             const std::vector<std::string>& live,
                                                             const NameRules& rules);

// Which of OLMo's kinds the directory holds, by the names of its files: a node that has its own
// ranks' files alone knows it, too. None: another kind, or no checkpoint. Throws `not_found` where
// there is nothing.
[[nodiscard]] std::optional<CheckpointKind> olmo_kind_at(const Location& where);

// What there is to restore into.
struct LiveNames {
  // Names of the model's parameters and buffers. Empty: names stay as they are stored.
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

// GroupCheckpoint: a checkpoint that the ranks of a group open together, look into, and load from.
//
//   run_ranks(2, [](Group& group) {
//     auto checkpoint = GroupCheckpoint::open("run/step100", {}, group);
//     Value tree = Value::dict();
//     for (const Leaf& leaf : checkpoint.contents().leaves)
//       if (leaf.name.starts_with("config.")) tree.set_item(leaf.name, Value());
//     checkpoint.load(tree);
//   });
//
// load() of checkpoint.h does both at once. All ranks see and load one save, even if the checkpoint
// is replaced meanwhile.

class GroupCheckpoint {
 public:
  // Rank 0 alone looks into the store. `group` must outlive the result. Throws on all ranks what
  // Checkpoint::open throws. Collective.
  [[nodiscard]] static GroupCheckpoint open(const Location& where, const LoadOptions& options,
                                            Group& group);

  // The same for ranks that will load `model`, a dict of names and tensors with each rank's pieces,
  // and its optimizer's state. Where every rank has saved just these pieces itself, as olmo-local
  // or olmo-legacy on as many ranks, each opens its own files and no other: then contents() has the
  // leaves of these files alone, without the trainer's state (stateful.h), and is_own() is
  // true. Every checksum of what load() reads is compared then. Throws `mismatch` on all ranks when
  // the files of two ranks are not of one save. Of olmo-legacy each needs no more than a file of
  // its own: where rank 0 does not see those of the others, ranks tell one another what theirs
  // hold, and is_own() is false.
  [[nodiscard]] static GroupCheckpoint open(const Location& where, const Value& model,
                                            const LoadOptions& options, Group& group);
  [[nodiscard]] bool is_own() const;

  // The leaves: names, paths, values, and tensors with dtype and shape. Tensors may lack their
  // pieces, so nothing but load() reads them. The same on every rank, unless is_own(). A copy must
  // not outlive this.
  [[nodiscard]] const Checkpoint& contents() const&;

  // Shows other leaves from now on, to contents() and to load(). `fn` gets the contents and returns
  // them with other leaves: tensors of theirs under other names, also one under several, and any
  // values. So do Checkpoint::map and as_training_state() of restore.h. All ranks must make the
  // same names: else it throws `mismatch`. Collective.
  void arrange(const std::function<Checkpoint(const Checkpoint& contents)>& fn);

  // Throws what load() throws before it has written any memory. Collective.
  void require_fit(const Value& tree, const LoadOptions& options = {});

  // Loads as load() of checkpoint.h does, with the reader that opened it. Any number of times.
  // Collective.
  LoadReport load(Value& tree, const LoadOptions& options = {});

  GroupCheckpoint(GroupCheckpoint&&) noexcept;
  GroupCheckpoint& operator=(GroupCheckpoint&&) noexcept;
  ~GroupCheckpoint();

 private:
  struct Opened;
  explicit GroupCheckpoint(std::unique_ptr<Opened> opened);
  std::unique_ptr<Opened> opened_;
};

}  // namespace tessera
