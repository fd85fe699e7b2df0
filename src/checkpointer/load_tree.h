// What a restore loads into: the memory of a model and its optimizer, and which keys of the
// checkpoint go where.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "checkpointer/optim_match.h"
#include "optim_state/optim_leaves.h"
#include "tessera/checkpoint.h"
#include "tessera/module_ref.h"
#include "tessera/optimizer_ref.h"

namespace tessera::detail {

class LoadTree {
 public:
  // Makes room in the optimizer for the state that `contents` has; without an optimizer it is left
  // alone. Changes nothing else. Throws `mismatch` for another model or other groups, `not_found`
  // where there is no optimizer in the checkpoint.
  LoadTree(const Checkpoint& contents, ModuleRef model, std::optional<OptimizerRef> optim);

  // For load() with the names that rename() gives.
  [[nodiscard]] Value& tree() noexcept { return tree_; }
  // The checkpoint's key for a key of the tree.
  [[nodiscard]] std::function<std::string(const std::string&)> rename() const;

  // After the load: gives the optimizer what was loaded. Returns, by group, the entries that the
  // optimizer does not know, and as "params" the names in the checkpoint's order, or none.
  [[nodiscard]] Value::List finish();
  // After a failure: takes back what the constructor changed.
  void undo();

 private:
  void add_model(const Checkpoint& contents, ModuleRef model);
  void add_optimizer(const Checkpoint& contents, ModuleRef model, const OptimizerRef& optim);
  void note_keys();

  Value tree_ = Value::dict();
  std::optional<OptimizerRef> optimizer_;
  std::optional<OptimLeaves> leaves_;
  OptimMatch match_;
  // Shared with rename(): of what is called otherwise in the checkpoint.
  std::shared_ptr<std::unordered_map<std::string, std::string>> keys_ =
      std::make_shared<std::unordered_map<std::string, std::string>>();
};

}  // namespace tessera::detail
