// The tree that a restore loads into: the memory of a model and its optimizer.
#pragma once

#include <optional>

#include "optim_state/optim_leaves.h"
#include "tessera/checkpoint.h"
#include "tessera/optimizer_ref.h"
#include "tessera/parameter.h"
#include "tessera/restore.h"
#include "tessera/value.h"

namespace tessera::detail {

// The names in each group of a checkpoint's optimizer, as it is stored, without wrappers, in its
// order. Groups without names are left out.
[[nodiscard]] Value::List stored_orders(const Checkpoint& contents);

class LoadTree {
 public:
  // Changes nothing yet. Without an optimizer it is left alone.
  LoadTree(ModuleRef model, std::optional<OptimizerRef> optim);

  // The model's tensors, with this rank's pieces.
  [[nodiscard]] const Value& model() const noexcept { return model_; }
  // What there is to restore into.
  [[nodiscard]] LiveNames names();

  // Makes room in the optimizer for the state that `contents` has, which as_training_state() gave
  // for these names. Throws `mismatch` for another model, `not_found` where there is no optimizer
  // in the checkpoint.
  void prepare(const Checkpoint& contents);
  // The same for the optimizer alone.
  void prepare_optimizer(const Checkpoint& contents);
  // For load().
  [[nodiscard]] Value& tree() noexcept { return tree_; }
  // After the load: gives the optimizer what was loaded. Returns, by group, the entries that the
  // optimizer does not know.
  [[nodiscard]] Value::List finish();
  // After a failure: takes back what prepare() changed.
  void undo();

 private:
  void add_model(const Checkpoint& contents);

  Value model_;  // the state of the model
  std::optional<OptimLeaves> leaves_;
  Value tree_ = Value::dict();
};

// The tree that OLMo's names in a safetensors file stand for (checkpoint-rows F-06, O-15).

// `flat` is a dict of tensors in memory, by the names of the file. Names that are not OLMo's stay.
// Throws `conflict` if two names lead to one place.
[[nodiscard]] Value nested(const Value& flat);

}  // namespace tessera::detail
