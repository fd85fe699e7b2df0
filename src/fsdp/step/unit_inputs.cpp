#include "fsdp/step/unit_inputs.h"

#include <torch/torch.h>

#include <algorithm>
#include <utility>

namespace tessera::detail {
namespace {

namespace impl = torch::autograd::impl;
using torch::autograd::Edge;

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

// A gradient that is retained is that of the tensor, whatever its history is.
void set_history(const at::Tensor& tensor, Edge edge) {
  auto* meta = impl::get_autograd_meta(tensor);
  const bool retains = tensor.retains_grad();
  if (retains) {
    meta->grad_fn_->pop_retains_grad_hook(meta->output_nr_);
    meta->retains_grad_ = false;
  }
  impl::set_gradient_edge(tensor, std::move(edge));
  if (retains) tensor.retain_grad();
}

bool is_behind(const at::Tensor& tensor, const compat::NodePtr& node) {
  return node && tensor.defined() && impl::gradient_edge(tensor).function == node;
}

}  // namespace

UnitInputs::UnitInputs(const std::vector<at::Tensor*>& inputs, bool lends,
                       std::function<void()> run) {
  std::vector<at::Tensor*> wanted;
  torch::autograd::edge_list edges;
  for (auto* input : inputs) {
    if (!input->defined()) continue;
    if (input->requires_grad()) {
      wanted.push_back(input);
      edges.push_back(impl::gradient_edge(*input));
    } else if (input->is_floating_point() || input->is_complex()) {
      give(*input, {}, {});
    }
  }
  if (wanted.empty()) return;
  auto node = compat::make_node<AfterBackward>(torch::autograd::edge_list(edges), std::move(run));
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    auto& input = *wanted[i];
    const Edge mine(node, node->add_input_metadata(input));
    if (!lends || input.is_leaf()) {
      input = view_of(input);
      impl::set_gradient_edge(input, mine);
      continue;
    }
    // One of its own: of what is changed autograd expects number 0, for views and for gradients
    // that are retained.
    auto own = compat::make_node<AfterBackward>(torch::autograd::edge_list{mine}, [] {});
    own->add_input_metadata(input);
    // Hooks that forward registers are of the tensor, and so of the history before.
    if (!impl::get_autograd_meta(input)->cpp_hooks_list_) impl::create_cpp_hook(input);
    give(input, edges[i], std::move(own));
  }
  for (const auto& one : given_) {
    if (one.node) set_history(one.tensor(), Edge(one.node, 0));
  }
}

void UnitInputs::give(const at::Tensor& tensor, Edge before, compat::NodePtr node) {
  given_.push_back({WeakTensor(tensor.getIntrusivePtr()), std::move(before), std::move(node)});
}

// What forward has changed keeps its new history, which goes through the node. The first node of a
// tensor that was given twice was replaced.
UnitInputs::~UnitInputs() {
  for (auto& one : given_) {
    if (const auto tensor = one.tensor(); is_behind(tensor, one.node))
      set_history(tensor, std::move(one.before));
  }
}

std::vector<at::Tensor> UnitInputs::changed() const {
  std::vector<at::Tensor> found;
  for (const auto& one : given_) {
    auto tensor = one.tensor();
    if (!tensor.defined() || !tensor.requires_grad() || tensor.is_leaf()) continue;
    if (!has_unchanged(tensor)) found.push_back(std::move(tensor));
  }
  return found;
}

bool UnitInputs::has_unchanged(const at::Tensor& tensor) const {
  return std::ranges::any_of(given_, [&](const Given& one) {
    return one.tensor().is_same(tensor) && is_behind(tensor, one.node);
  });
}

}  // namespace tessera::detail
