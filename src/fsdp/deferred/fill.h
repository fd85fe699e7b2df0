// What a unit's tensors hold before they are cut: data where they have none.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <functional>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace tessera::detail {

using NamedModule = std::pair<std::string, torch::nn::Module*>;  // with a dot behind the name

// `module`, named "", and what is below it, each once, breadth first; children for which `enters`
// is false are left out with all that only they reach.
[[nodiscard]] std::vector<NamedModule> modules_below(
    torch::nn::Module& module, const std::function<bool(const torch::nn::Module&)>& enters);

struct FillOptions {
  torch::Device device = torch::kCPU;
  std::function<void(torch::nn::Module&)> param_init_fn = {};
  std::unordered_set<const void*> ignored = {};  // TensorImpls that stay as they are
};
// `materialize` of tessera/deferred_init.h for the own tensors of these modules.
void fill(const std::vector<NamedModule>& modules, const FillOptions& options);

}  // namespace tessera::detail
