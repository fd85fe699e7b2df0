#include "fsdp/step/unit_inputs.h"

#include <torch/torch.h>

#include <algorithm>
#include <utility>

namespace tessera::detail {
namespace {

class AfterBackward : public torch::autograd::Node {
 public:
  AfterBackward(torch::autograd::edge_list&& edges, std::function<void()> run)
      : Node(std::move(edges)), run_(std::move(run)) {}
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    run_();
    return std::move(gradients);
  }

 private:
  std::function<void()> run_;
};

at::Tensor view_of(const at::Tensor& tensor) {
  const torch::NoGradGuard no_grad;
  return tensor.view_as(tensor);
}

// A gradient that is retained is that of the history which the tensor has now.
bool is_lendable(const at::Tensor& tensor) {
  return !tensor.is_leaf() && !tensor.retains_grad();
}

}  // namespace

UnitInputs::UnitInputs(const std::vector<at::Tensor*>& inputs, bool lends,
                       std::function<void()> run) {
  std::vector<at::Tensor*> wanted;
  torch::autograd::edge_list edges;
  for (auto* input : inputs) {
    if (!input->defined() || !input->requires_grad()) continue;
    wanted.push_back(input);
    edges.push_back(torch::autograd::impl::gradient_edge(*input));
  }
  if (wanted.empty()) return;
  auto befores = edges;
  node_ = compat::make_node<AfterBackward>(std::move(edges), std::move(run));
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    auto& input = *wanted[i];
    if (lends && is_lendable(input)) {
      lent_.push_back({input, std::move(befores[i])});
    } else {
      input = view_of(input);
    }
    torch::autograd::create_gradient_edge(input, node_);
  }
}

// What forward has changed keeps its new history, which goes through the node.
UnitInputs::~UnitInputs() {
  for (auto& [tensor, before] : lent_) {
    if (is_behind(tensor)) torch::autograd::impl::set_gradient_edge(tensor, std::move(before));
  }
}

bool UnitInputs::has_unchanged(const at::Tensor& tensor) const {
  return std::ranges::any_of(lent_, [&](const Lent& one) { return one.tensor.is_same(tensor); }) &&
         is_behind(tensor);
}

bool UnitInputs::is_behind(const at::Tensor& tensor) const {
  return torch::autograd::impl::gradient_edge(tensor).function == node_;
}

}  // namespace tessera::detail
