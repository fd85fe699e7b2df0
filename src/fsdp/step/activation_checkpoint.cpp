#include "tessera/activation_checkpoint.h"

#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/torch.h>

#include <algorithm>
#include <mutex>
#include <string>
#include <utility>

#include "tessera/error.h"
#include "tessera/layout.h"
#include "torch/compat.h"
#include "torch/device.h"

namespace tessera::detail {
namespace {

// The state that a computation depends on besides its inputs.
class Surroundings {
 public:
  explicit Surroundings(at::Device device) : device_(device) {
    for (auto generator : generators()) {
      const std::lock_guard lock(generator.mutex());
      states_.push_back(generator.get_state());
    }
    for (const auto type : types()) {
      autocast_.emplace_back(at::autocast::is_autocast_enabled(type),
                             at::autocast::get_autocast_dtype(type));
    }
  }

  [[nodiscard]] at::Device device() const { return device_; }
  // Autocast keeps what it cast of a weight, with the weight's history, for whoever uses the weight
  // next. Neither of the two forwards may hand that on: the first has no history, and that of the
  // second is used up by its backward, after which the weight may change.
  void forget_casts() const {
    const auto is_on = [](const auto& kind) { return kind.first; };
    if (std::ranges::any_of(autocast_, is_on)) at::autocast::clear_cache();
  }

  void restore() const {
    const auto all = generators();
    for (std::size_t i = 0; i < all.size(); ++i) {
      auto generator = all[i];
      const std::lock_guard lock(generator.mutex());
      generator.set_state(states_[i]);
    }
    const auto kinds = types();
    for (std::size_t i = 0; i < kinds.size(); ++i) {
      at::autocast::set_autocast_enabled(kinds[i], autocast_[i].first);
      at::autocast::set_autocast_dtype(kinds[i], autocast_[i].second);
    }
  }

 private:
  [[nodiscard]] std::vector<at::DeviceType> types() const {
    if (!is_accelerator(device_)) return {at::kCPU};
    return {at::kCPU, device_.type()};
  }
  [[nodiscard]] std::vector<at::Generator> generators() const {
    std::vector<at::Generator> all;
    for (const auto type : types())
      all.push_back(at::globalContext().defaultGenerator(type == at::kCPU ? at::kCPU : device_));
    return all;
  }

  at::Device device_;
  std::vector<at::Tensor> states_;
  std::vector<std::pair<bool, at::ScalarType>> autocast_;
};

// Within its life others' surroundings hold.
class SurroundingsGuard {
 public:
  explicit SurroundingsGuard(const Surroundings& others) : own_(others.device()), others_(others) {
    others_.restore();
    others_.forget_casts();
  }
  ~SurroundingsGuard() {
    others_.forget_casts();
    own_.restore();
  }
  SurroundingsGuard(const SurroundingsGuard&) = delete;
  SurroundingsGuard& operator=(const SurroundingsGuard&) = delete;

 private:
  Surroundings own_;
  const Surroundings& others_;
};

// Gradients come for it: autograd leads from it to the node of its checkpoint.
bool has_edge(const at::Tensor& output) {
  return output.defined() && (output.is_floating_point() || output.is_complex());
}

// What is computed again is a graph of its own, and its backward one of its own: it adds to the
// grad() of every parameter, whatever was asked for, and has no history itself.
void require_plain_backward() {
  if (!torch::autograd::Engine::get_default_engine().is_checkpoint_valid()) {
    throw Error(ErrorCode::unsupported,
                "torch::autograd::grad, or backward with `inputs`, went through a checkpointed "
                "part, whose backward adds to the grad() of all of its parameters: call backward() "
                "without `inputs`, or do without the checkpoint there");
  }
  if (torch::GradMode::is_enabled()) {
    throw Error(ErrorCode::unsupported,
                "a backward with create_graph went through a checkpointed part, whose gradients "
                "have no history: do without the checkpoint there");
  }
}

// The form of what the first computation gave, which the second has to give again: autograd has
// sized the gradients by it.
struct Form {
  bool has_edge = false;
  std::vector<std::int64_t> sizes;
  bool operator==(const Form&) const = default;

  static std::vector<Form> of(const std::vector<at::Tensor>& outputs) {
    std::vector<Form> forms;
    for (const auto& output : outputs) {
      auto& form = forms.emplace_back();
      form.has_edge = tessera::detail::has_edge(output);
      if (output.defined()) form.sizes = output.sizes().vec();
    }
    return forms;
  }
};

std::string text_of(const std::vector<Form>& forms) {
  std::string text = std::to_string(forms.size()) + " tensors:";
  for (const auto& form : forms) text += " " + to_string(form.sizes);
  return text;
}

// Computes again and sends the gradients through what was computed.
class Checkpoint : public torch::autograd::Node {
 public:
  Checkpoint(Recompute compute, const std::vector<at::Tensor>& inputs, std::vector<Form> forms,
             Surroundings surroundings, torch::autograd::edge_list&& edges)
      : Node(std::move(edges)),
        compute_(std::move(compute)),
        forms_(std::move(forms)),
        surroundings_(std::move(surroundings)) {
    for (const auto& input : inputs) {
      saved_.emplace_back(input, /*is_output=*/false);
      requires_grad_.push_back(input.defined() && input.requires_grad());
    }
  }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    if (!compute_) {
      throw Error(ErrorCode::invalid_argument,
                  "a checkpointed part was run backward a second time; retain_graph=true keeps it");
    }
    require_plain_backward();
    const auto inputs = unpacked_inputs();
    backward_through(compute_again(inputs), gradients);
    torch::autograd::variable_list into;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      if (requires_grad_[i]) into.push_back(inputs[i].grad());
    }
    return into;
  }

  void release_variables() override {
    saved_.clear();
    compute_ = nullptr;
  }

 private:
  [[nodiscard]] std::vector<at::Tensor> unpacked_inputs() const {
    std::vector<at::Tensor> inputs;
    for (std::size_t i = 0; i < saved_.size(); ++i) {
      auto input = saved_[i].unpack();
      if (input.defined()) input = input.detach().set_requires_grad(requires_grad_[i]);
      inputs.push_back(std::move(input));
    }
    return inputs;
  }

  std::vector<at::Tensor> compute_again(const std::vector<at::Tensor>& inputs) const {
    const at::AutoGradMode enabled(true);
    const SurroundingsGuard guard(surroundings_);
    auto outputs = compute_(inputs);
    const auto forms = Form::of(outputs);
    if (forms == forms_) return outputs;
    throw Error(ErrorCode::mismatch, "a checkpointed part gave " + text_of(forms_) +
                                         ", and computed again for its "
                                         "backward it gave " +
                                         text_of(forms) + ": it must do the same both times");
  }

  static void backward_through(const std::vector<at::Tensor>& outputs,
                               const torch::autograd::variable_list& gradients) {
    std::vector<at::Tensor> roots, seeds;
    std::size_t next = 0;
    for (const auto& output : outputs) {
      if (!has_edge(output)) continue;
      const auto& gradient = gradients[next++];
      if (!output.requires_grad() || !gradient.defined()) continue;
      roots.push_back(output);
      seeds.push_back(gradient);
    }
    if (!roots.empty()) torch::autograd::backward(roots, seeds);
  }

  Recompute compute_;
  std::vector<Form> forms_;  // of what it gave
  std::vector<torch::autograd::SavedVariable> saved_;
  std::vector<bool> requires_grad_;
  Surroundings surroundings_;
};

at::Device device_of(const std::vector<at::Tensor>& tensors) {
  for (const auto& tensor : tensors) {
    if (tensor.defined() && !tensor.is_cpu()) return tensor.device();
  }
  return at::kCPU;
}

torch::autograd::edge_list edges_to(const std::vector<at::Tensor>& inputs) {
  torch::autograd::edge_list edges;
  for (const auto& input : inputs) {
    if (input.defined() && input.requires_grad())
      edges.push_back(torch::autograd::impl::gradient_edge(input));
  }
  return edges;
}

}  // namespace

std::vector<at::Tensor> run_checkpointed(Recompute compute, std::vector<at::Tensor> inputs) {
  if (!torch::GradMode::is_enabled()) return compute(inputs);
  const Surroundings surroundings(device_of(inputs));
  std::vector<at::Tensor> outputs;
  {
    const torch::NoGradGuard no_grad;
    outputs = compute(inputs);
    surroundings.forget_casts();
  }
  // Also without inputs that want gradients: the parameters of what was computed may want them.
  const auto node = compat::make_node<Checkpoint>(std::move(compute), inputs, Form::of(outputs),
                                                  surroundings, edges_to(inputs));
  for (auto& output : outputs) {
    if (output.defined()) output = output.detach();
    if (has_edge(output)) torch::autograd::create_gradient_edge(output, node);
  }
  return outputs;
}

}  // namespace tessera::detail
