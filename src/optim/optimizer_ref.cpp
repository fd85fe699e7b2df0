#include <algorithm>
#include <atomic>
#include <string>

#include <c10/util/Type.h>
#include <torch/torch.h>

#include "optim/adamw.h"
#include "optim/fields.h"
#include "optim/optimizer_formats.h"
#include "tessera/error.h"
#include "tessera/lr_scheduler.h"
#include "tessera/optimizer_ref.h"
#include "torch/tensor.h"

namespace tessera {
namespace {

// The optimizer has zeros with a gradient of zeros in the place of its parameters while it lives.
class StandIn {
 public:
  StandIn(torch::optim::Optimizer& optimizer, const at::Tensor& parameter)
      : optimizer_(optimizer),
        zeros_(torch::zeros(parameter.sizes(), parameter.options().requires_grad(false))) {
    zeros_.mutable_grad() = torch::zeros_like(zeros_);
    for (auto& group : optimizer.param_groups()) {
      auto& own = own_.emplace_back(std::exchange(group.params(), {}));
      if (std::ranges::any_of(own, [&](const auto& one) { return one.is_same(parameter); }))
        group.params().push_back(zeros_);
    }
  }
  ~StandIn() {
    for (std::size_t g = 0; g < own_.size(); ++g)
      optimizer_.param_groups()[g].params() = std::move(own_[g]);
    optimizer_.state().erase(zeros_.unsafeGetTensorImpl());
  }
  StandIn(const StandIn&) = delete;
  StandIn& operator=(const StandIn&) = delete;

  [[nodiscard]] const at::Tensor& tensor() const noexcept { return zeros_; }

 private:
  torch::optim::Optimizer& optimizer_;
  at::Tensor zeros_;
  std::vector<std::vector<at::Tensor>> own_;  // by group
};

void fill_with_zeros(const Value& state) {
  for (const auto& [name, value] : state.pairs()) {
    if (value.is(Value::Kind::tensor) && numel(value.as_tensor().shape) > 0)
      tensor_of(value.as_tensor()).zero_();
  }
}

class TorchAccess final : public OptimizerAccess {
 public:
  explicit TorchAccess(torch::optim::Optimizer& optimizer) : optimizer_(optimizer) {
    const auto& type = typeid(optimizer);
    format_ = detail::find_format(type);
    if (format_ != nullptr) return;
    throw Error(ErrorCode::unsupported, "optimizer " + c10::demangle(type.name()) +
                                            " is not described: see register_optimizer of "
                                            "tessera/optimizer_ref.h");
  }

  std::vector<std::vector<at::Tensor>> parameters() const override {
    std::vector<std::vector<at::Tensor>> groups;
    for (const auto& group : optimizer_.param_groups()) groups.push_back(group.params());
    return groups;
  }

  Value group(std::size_t index) const override {
    detail::FieldsToDict fields;
    format_->options(fields, optimizer_.param_groups().at(index).options());
    return fields.take();
  }

  void check_group(std::size_t index, const Value& options) const override {
    detail::require_options_of(format_->name, options);
    const auto scratch = optimizer_.param_groups().at(index).options().clone();
    detail::DictToFields fields(options, {}, false);
    format_->options(fields, *scratch);
  }

  void set_group(std::size_t index, const Value& options) override {
    detail::DictToFields fields(options, {}, false);
    format_->options(fields, optimizer_.param_groups().at(index).options());
    for (const auto& name : fields.left_over()) detail::warn_of_option(format_->name, name);
  }

  Value state(const at::Tensor& parameter) const override {
    const auto found = optimizer_.state().find(parameter.unsafeGetTensorImpl());
    if (found == optimizer_.state().end()) return {};
    // Those that others described: once a tensor is there that the first check did not see.
    if (format_->make_options && !is_checked_.exchange(true))
      detail::require_complete(*format_, *found->second);
    detail::FieldsToDict fields;
    format_->state(fields, *found->second);
    return fields.take();
  }

  void check_state(const at::Tensor& parameter, const Value& state) const override {
    if (!state.is(Value::Kind::none)) (void)parsed(parameter, state, true);
  }

  void set_state(const at::Tensor& parameter, const Value& state, bool keep) override {
    auto* key = parameter.unsafeGetTensorImpl();
    if (state.is(Value::Kind::none)) {
      optimizer_.state().erase(key);
    } else {
      optimizer_.state()[key] = parsed(parameter, state, keep);
    }
  }

  // Takes a step, as PyTorch does, which steps with the parameters themselves.
  Value first_state(const at::Tensor& parameter) const override {
    const StandIn stand_in(optimizer_, parameter);
    try {
      optimizer_.step();
    } catch (const c10::Error&) {
      return {};  // it steps only with a loss (LBFGS), or has all states from the beginning
                  // (Adagrad)
    }
    auto made = state(stand_in.tensor());
    if (!made.is(Value::Kind::none)) fill_with_zeros(made);
    return made;
  }

 private:
  std::unique_ptr<torch::optim::OptimizerParamState> parsed(const at::Tensor& parameter,
                                                            const Value& state, bool keep) const {
    auto made = format_->make_state();
    detail::DictToFields fields(state, parameter, keep);
    format_->state(fields, *made);
    return made;
  }

  torch::optim::Optimizer& optimizer_;
  const OptimizerFormat* format_;
  mutable std::atomic<bool> is_checked_ = false;
};

class AdamWAccess final : public OptimizerAccess {
 public:
  explicit AdamWAccess(AdamW& optimizer) : optimizer_(optimizer) {
    for (std::size_t g = 0; g < optimizer.group_count(); ++g) {
      const auto& parameters = optimizer.parameters(g);
      for (std::size_t i = 0; i < parameters.size(); ++i)
        places_.emplace(parameters[i].local.unsafeGetTensorImpl(), std::pair{g, i});
    }
  }

  std::vector<std::vector<at::Tensor>> parameters() const override {
    std::vector<std::vector<at::Tensor>> groups;
    for (std::size_t g = 0; g < optimizer_.group_count(); ++g)
      groups.push_back(local_tensors(optimizer_.parameters(g)));
    return groups;
  }
  Value group(std::size_t index) const override {
    return detail::group_value(optimizer_.options(index));
  }
  void check_group(std::size_t /*index*/, const Value& options) const override {
    (void)detail::group_options(options);
  }
  void set_group(std::size_t index, const Value& options) override {
    const auto group = detail::group_options(options);
    optimizer_.options(index) = group.options;
    for (const auto& name : group.unknown) detail::warn_of_option("AdamW", name);
  }

  Value state(const at::Tensor& parameter) const override {
    const auto [group, index] = place_of(parameter);
    const auto& state = optimizer_.state(group, index);
    return state.defined() ? dict_of(state) : Value();
  }
  Value first_state(const at::Tensor& parameter) const override {
    const auto zeros = [&] { return torch::zeros(parameter.sizes(), parameter.options()); };
    return dict_of({torch::zeros({}, torch::kFloat32), zeros(), zeros()});
  }
  // The numbers of steps are copied when a state is asked for.
  std::optional<std::vector<at::Tensor>> awaited_state() const override {
    std::vector<at::Tensor> moments;
    for (std::size_t g = 0; g < optimizer_.group_count(); ++g) {
      for (std::size_t i = 0; i < optimizer_.parameters(g).size(); ++i) {
        const auto& state = optimizer_.state(g, i);
        if (state.defined()) moments.insert(moments.end(), {state.exp_avg, state.exp_avg_sq});
      }
    }
    return moments;
  }

  void check_state(const at::Tensor& parameter, const Value& state) const override {
    if (!state.is(Value::Kind::none)) (void)parsed(parameter, state);
  }
  void set_state(const at::Tensor& parameter, const Value& state, bool /*keep*/) override {
    const auto [group, index] = place_of(parameter);
    optimizer_.set_state(group, index,
                         state.is(Value::Kind::none) ? AdamWState{} : parsed(parameter, state));
  }

 private:
  [[nodiscard]] std::pair<std::size_t, std::size_t> place_of(const at::Tensor& parameter) const {
    return places_.at(parameter.unsafeGetTensorImpl());
  }

  static Value dict_of(AdamWState state) {
    detail::FieldsToDict fields;
    state.step = state.step.clone();
    fields.value("step", [&] { return Value(leaf_of(state.step)); }, {});
    fields.tensor("exp_avg", state.exp_avg);
    fields.tensor("exp_avg_sq", state.exp_avg_sq);
    return fields.take();
  }

  // Views of what was given; AdamW copies them.
  static AdamWState parsed(const at::Tensor& parameter, const Value& state) {
    AdamWState made;
    std::int64_t step = 0;
    detail::DictToFields fields(state, parameter, /*keep=*/true);
    fields.count("step", step);
    fields.tensor("exp_avg", made.exp_avg);
    fields.tensor("exp_avg_sq", made.exp_avg_sq);
    for (const auto* name : {"step", "exp_avg", "exp_avg_sq"}) {
      if (state.find(name) == nullptr)
        throw Error(ErrorCode::mismatch, "the state of AdamW lacks this entry").at_key(name);
    }
    made.step = torch::tensor(static_cast<float>(step), torch::kFloat32);
    return made;
  }

  AdamW& optimizer_;
  std::unordered_map<const c10::TensorImpl*, std::pair<std::size_t, std::size_t>> places_;
};

}  // namespace

OptimizerRef::OptimizerRef(torch::optim::Optimizer& optimizer)
    : access_(std::make_shared<TorchAccess>(optimizer)) {}
OptimizerRef::OptimizerRef(AdamW& optimizer) : access_(std::make_shared<AdamWAccess>(optimizer)) {}
OptimizerRef::OptimizerRef(std::shared_ptr<OptimizerAccess> access) : access_(std::move(access)) {}

OptimizerRef OptimizerRef::with_names(std::shared_ptr<const Names> names) const {
  auto named = *this;
  named.names_ = std::move(names);
  return named;
}

std::vector<std::vector<OptimizerRef::Key>> OptimizerRef::keys() const {
  std::vector<std::vector<Key>> groups;
  std::int64_t number = 0;
  for (const auto& group : access_->parameters()) {
    auto& keys = groups.emplace_back();
    for (const auto& parameter : group) {
      Value key(number++);
      if (names_) {
        const auto name = names_->find(parameter.unsafeGetTensorImpl());
        if (name == names_->end()) {
          throw Error(ErrorCode::invalid_argument,
                      "the optimizer has a parameter that is not one of the model's");
        }
        key = Value(name->second);
      }
      keys.push_back({std::move(key), parameter});
    }
  }
  return groups;
}

Value optimizer_state_dict(const OptimizerRef& optimizer) {
  std::vector<Value::Pair> state;
  Value::List groups;
  auto& access = optimizer.access();
  const auto keys = optimizer.keys();
  for (std::size_t g = 0; g < keys.size(); ++g) {
    Value::List params;
    for (const auto& [key, parameter] : keys[g]) {
      params.push_back(key);
      auto entry = access.state(parameter);
      if (!entry.is(Value::Kind::none)) state.emplace_back(key, std::move(entry));
    }
    if (optimizer.is_named()) {
      std::ranges::sort(params, {}, [](const Value& name) { return name.as_string(); });
    }
    auto group = access.group(g);
    group.set_item("params", Value::list(std::move(params)));
    groups.push_back(std::move(group));
  }
  return Value::dict(
      {{"state", Value::dict(std::move(state))}, {"param_groups", Value::list(std::move(groups))}});
}

namespace {

void require_group(const OptimizerRef& optimizer, std::size_t group) {
  const auto count = group_count(optimizer);
  if (group < count) return;
  throw Error(ErrorCode::invalid_argument, "group " + std::to_string(group) +
                                               " of an optimizer of " + std::to_string(count) +
                                               (count == 1 ? " group" : " groups"));
}

// All options of the group: AdamW takes them together or not at all.
Value options_with(const OptimizerRef& optimizer, std::size_t group, const char* option) {
  require_group(optimizer, group);
  auto options = optimizer.access().group(group);
  if (options.find(option) == nullptr) {
    throw Error(ErrorCode::unsupported, "the optimizer has no such option in its groups")
        .at_key(option);
  }
  return options;
}

double get_option(const OptimizerRef& optimizer, std::size_t group, const char* option) {
  const auto options = options_with(optimizer, group, option);
  return detail::number_of(options.at(option));
}

void set_option(const OptimizerRef& optimizer, std::size_t group, const char* option,
                double value) {
  if (!(value >= 0)) {
    throw Error(ErrorCode::invalid_argument, std::to_string(value) + ", expected 0 or more")
        .at_key(option);
  }
  auto options = options_with(optimizer, group, option);
  options.set_item(option, value);
  optimizer.access().set_group(group, options);
}

}  // namespace

std::size_t group_count(const OptimizerRef& optimizer) {
  return optimizer.access().parameters().size();
}

double get_lr(const OptimizerRef& optimizer, std::size_t group) {
  return get_option(optimizer, group, "lr");
}
void set_lr(const OptimizerRef& optimizer, std::size_t group, double lr) {
  set_option(optimizer, group, "lr", lr);
}

double get_weight_decay(const OptimizerRef& optimizer, std::size_t group) {
  return get_option(optimizer, group, "weight_decay");
}
void set_weight_decay(const OptimizerRef& optimizer, std::size_t group, double weight_decay) {
  set_option(optimizer, group, "weight_decay", weight_decay);
}

}  // namespace tessera
