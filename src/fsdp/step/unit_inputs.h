// UnitInputs: what tells that a unit's backward is over, while its forward runs.
//
// A node of autograd sits between the unit's inputs and what came before. Autograd runs it when the
// gradients of all inputs are there: after everything of the unit's own backward, whose nodes are
// younger.
#pragma once

#include <torch/csrc/autograd/edge.h>
#include <torch/types.h>

#include <functional>
#include <vector>

#include "torch/compat.h"

namespace tessera::detail {

class UnitInputs {
 public:
  UnitInputs() = default;
  // `run` is called after the backward; never, where no input wants a gradient. `lends`: the node
  // becomes the history of the caller's own tensors for as long as this lives, so that forward may
  // change them in place. Else, and for leaves, forward gets views, which autograd lets nobody
  // change.
  UnitInputs(const std::vector<at::Tensor*>& inputs, bool lends, std::function<void()> run);
  ~UnitInputs();
  UnitInputs(UnitInputs&&) = default;
  UnitInputs& operator=(UnitInputs&&) = default;  // onto one that has lent nothing
  UnitInputs(const UnitInputs&) = delete;
  UnitInputs& operator=(const UnitInputs&) = delete;

  // The inputs that forward has changed in place, lent or without a gradient of their own before:
  // the gradient comes through the unit, whoever uses it.
  [[nodiscard]] std::vector<at::Tensor> changed() const;
  // `tensor` is one that was lent, and nobody has changed it.
  [[nodiscard]] bool has_unchanged(const at::Tensor& tensor) const;

 private:
  using WeakTensor = c10::weak_intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>;
  // Not owned: forward may be done with it early.
  struct Given {
    WeakTensor weak;
    torch::autograd::Edge before;
    compat::NodePtr node;  // its history while nobody changes it; null: it was not lent
    [[nodiscard]] at::Tensor tensor() const { return at::Tensor(weak.lock()); }
  };
  void give(const at::Tensor& tensor, torch::autograd::Edge before, compat::NodePtr node);

  std::vector<Given> given_;
};

}  // namespace tessera::detail
