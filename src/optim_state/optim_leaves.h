// OptimLeaves: the state of an optimizer on sharded parameters as the tree that a checkpoint has,
// whose leaves are the parts of whole parameters that this rank holds, over the optimizer's own
// memory.
//
// Nothing is communicated. optim_state_dict (tessera/pytorch/optim_state_dict.h) gathers and
// copies; this is what saves and loads a training without either.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tessera/load_options.h"
#include "tessera/optimizer_ref.h"
#include "tessera/parameter.h"
#include "tessera/restore.h"
#include "tessera/value.h"

namespace tessera::detail {

class OptimLeaves {
 public:
  // Throws `invalid_argument` for a parameter of the optimizer that is not one of the model's.
  OptimLeaves(ModuleRef model, OptimizerRef optimizer);

  // {"state": {name: {...}}, "param_groups": [{..., "params": [name, ...]}]}.
  [[nodiscard]] Value tree();

  // Makes the state that `stored`, such a tree of a checkpoint, has for each parameter, and forgets
  // what it lacks; state that has its form already stays where it is. Throws `not_found` for a tree
  // without an optimizer's parts, `mismatch` when the groups hold other parameters, and `mismatch`
  // or `unsupported` for state or options that the optimizer cannot have; undo() then takes back
  // what was changed before. OnDifference::report: groups and parameters that are not in the
  // checkpoint begin afresh instead.
  void prepare(const Value& stored, OnDifference missing = OnDifference::refuse);
  // The parameters that began afresh in the last prepare(), by name.
  [[nodiscard]] std::vector<std::string> missing() const { return missing_; }
  // After prepare(): tree(), and of the groups also what `stored` has and the optimizer does not
  // know.
  [[nodiscard]] Value tree_like(const Value& stored);
  // Gives the optimizer what a load has put into `loaded`, such a tree. Returns, by group, the
  // entries that it does not know.
  Value::List finish(const Value& loaded);
  // Takes back what prepare() changed.
  void undo();

 private:
  // A parameter of the optimizer, and its state in the optimizer's own shapes.
  struct Held {
    const ShardedParameter* parameter;
    std::string key;      // its own name or, of a flat parameter, that of one in it
    Value state = {};     // as OptimizerAccess::state gave it for the tree; `none`: it has none
    bool is_new = false;  // prepare() replaced `before`
    Value before = {};
  };
  [[nodiscard]] static std::vector<std::string> names_of(const std::vector<Held>& group);
  void require_same_groups(const Value::List& stored) const;
  [[nodiscard]] std::vector<std::string> unlisted(const Value::List& stored) const;
  void prepare_state(Held& held, const Value& states);

  OptimizerRef optimizer_;
  std::vector<ShardedParameter> parameters_;  // of the model
  std::vector<std::vector<Held>> groups_;     // of the optimizer
  std::vector<std::string> missing_;
};

// What as_training_state of tessera/restore.h asks of a model's state and of its optimizer, if
// there is one.
[[nodiscard]] LiveNames live_names(const Value& model, std::optional<OptimLeaves>& optimizer);

}  // namespace tessera::detail
