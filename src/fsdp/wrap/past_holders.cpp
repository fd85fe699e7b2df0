#include "fsdp/wrap/past_holders.h"

#include <algorithm>
#include <string>
#include <typeinfo>
#include <unordered_set>
#include <utility>

#include <torch/torch.h>

#include "base/log.h"
#include "fsdp/unit/registry.h"
#include "tessera/error.h"

namespace tessera::detail {
namespace {

template <typename... Impls>
bool is_instance_of(const torch::nn::Module& module) {
  return ((dynamic_cast<const Impls*>(&module) != nullptr) || ...);
}

using IsUnit = std::function<bool(const torch::nn::Module& module)>;

[[noreturn]] void throw_called(const std::string& name, const torch::nn::Module& module,
                               const torch::nn::Module& caller) {
  throw Error(ErrorCode::invalid_argument,
              "'" + name + "' (" + module.name() + ") cannot be a unit: libtorch's " +
                  caller.name() +
                  " calls it by itself, past fully_shard; make that or a module around it the "
                  "unit");
}

// `caller`: the outermost such module around `module`; null when there is none.
void refuse(const torch::nn::Module& module, const std::string& name,
            const torch::nn::Module* caller, const IsUnit& is_unit) {
  if (caller != nullptr && is_unit(module)) throw_called(name, module, *caller);
  if (caller == nullptr && calls_past_holders(module)) caller = &module;
  const auto prefix = name.empty() ? name : name + ".";
  for (const auto& child : module.named_children())
    refuse(*child.value(), prefix + child.key(), caller, is_unit);
}

}  // namespace

bool calls_past_holders(const torch::nn::Module& module) {
  using namespace torch::nn;  // NOLINT(google-build-using-namespace)
  return is_instance_of<TransformerImpl, TransformerEncoderImpl, TransformerDecoderImpl,
                        TransformerEncoderLayerImpl, TransformerDecoderLayerImpl,
                        MultiheadAttentionImpl, AdaptiveLogSoftmaxWithLossImpl>(module);
}

void refuse_below_callers(const torch::nn::Module& top, const std::string& prefix,
                          const IsUnit& is_unit) {
  refuse(top, prefix, nullptr, is_unit);
}

void require_callable_units(const torch::nn::Module& top) {
  refuse(top, "", nullptr,
         [](const torch::nn::Module& module) { return find_unit(&module) != nullptr; });
}

namespace {

// The parameters that units below `module` were told to leave.
std::unordered_set<const c10::TensorImpl*> left_out(const torch::nn::Module& module) {
  std::unordered_set<const c10::TensorImpl*> left;
  const auto add = [&left](const std::vector<at::Tensor>& parameters) {
    for (const auto& parameter : parameters) left.insert(parameter.unsafeGetTensorImpl());
  };
  for (const auto& [name, unit] : units_below(module)) {
    add(unit->options().ignored_parameters);
    for (const auto* ignored : unit->ignored_modules()) add(ignored->parameters());
  }
  return left;
}

bool trains_in_no_unit(const at::Tensor& parameter) {
  return parameter.defined() && parameter.requires_grad() && !find_owner(parameter).unit;
}

// In no unit and trained, though no unit was told to leave them; each once.
std::vector<std::string> forgotten_below(const torch::nn::Module& module) {
  auto left = left_out(module);
  std::vector<std::string> names;
  for (const auto& entry : module.named_parameters()) {
    if (!trains_in_no_unit(entry.value())) continue;
    if (left.insert(entry.value().unsafeGetTensorImpl()).second) names.push_back(entry.key());
  }
  return names;
}

// "parameter 'a' and 2 more are".
std::string as_subject(const std::vector<std::string>& names) {
  const auto first = "parameter '" + names.front() + "'";
  if (names.size() == 1) return first + " is";
  return first + " and " + std::to_string(names.size() - 1) + " more are";
}

}  // namespace

void warn_of_forgotten(const torch::nn::Module& module) {
  const auto units = units_below(module);
  // A model whose outermost module is a unit has none; only some are left to look for.
  if (units.empty() || units.front().first.empty()) return;
  auto& first = *units.front().second;
  if (first.has_warned_of_forgotten || first.all_ranks().size() == 1) return;
  const auto names = forgotten_below(module);
  if (names.empty()) return;
  first.has_warned_of_forgotten = true;
  log_of_all(
      LogLevel::warning,
      as_subject(names) +
          " in no unit: nobody averages the gradients over the ranks, every rank trains values of "
          "its own, and a checkpoint gets those of one. Call fully_shard on the outermost module "
          "too, or name in ignored_parameters what is meant to stay out");
}

namespace {

// A class that derives from Impl may be what the slot holds: its own type has to be known.
template <typename Impl>
SlotMaker maker_if_is(const std::shared_ptr<torch::nn::Module>& module) {
  if (typeid(*module) != typeid(Impl)) return nullptr;
  return make_slot_maker(std::dynamic_pointer_cast<Impl>(module));
}

template <typename... Impls>
SlotMaker first_maker(const std::shared_ptr<torch::nn::Module>& module) {
  SlotMaker maker;
  static_cast<void>(((maker = maker_if_is<Impls>(module)) || ...));
  return maker;
}

}  // namespace

SlotMaker slot_maker_of_libtorch(const std::shared_ptr<torch::nn::Module>& module) {
  using namespace torch::nn;  // NOLINT(google-build-using-namespace)
  return first_maker<LinearImpl, BilinearImpl, EmbeddingImpl, EmbeddingBagImpl, Conv1dImpl,
                     Conv2dImpl, Conv3dImpl, ConvTranspose1dImpl, ConvTranspose2dImpl,
                     ConvTranspose3dImpl, LayerNormImpl, GroupNormImpl, BatchNorm1dImpl,
                     BatchNorm2dImpl, BatchNorm3dImpl, InstanceNorm1dImpl, InstanceNorm2dImpl,
                     InstanceNorm3dImpl, PReLUImpl, RNNImpl, LSTMImpl, GRUImpl>(module);
}

}  // namespace tessera::detail
