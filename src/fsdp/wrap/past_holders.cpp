#include "fsdp/wrap/past_holders.h"

#include <torch/torch.h>

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

}  // namespace tessera::detail
