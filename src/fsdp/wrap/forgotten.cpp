#include "fsdp/wrap/forgotten.h"

#include <algorithm>
#include <string>
#include <unordered_set>
#include <utility>

#include "base/log.h"
#include "fsdp/unit/registry.h"

namespace tessera::detail {
namespace {

// In no unit and trained, though no unit was told to leave them; each once.
std::vector<std::string> forgotten_below(const torch::nn::Module& module) {
  std::unordered_set<const c10::TensorImpl*> left;
  for (const auto& [name, unit] : units_below(module)) {
    for (const auto& parameter : unit->options().ignored_parameters)
      left.insert(parameter.unsafeGetTensorImpl());
    for (const auto* ignored : unit->ignored_modules()) {
      for (const auto& parameter : ignored->parameters())
        left.insert(parameter.unsafeGetTensorImpl());
    }
  }
  std::vector<std::string> names;
  for (const auto& entry : module.named_parameters()) {
    const auto& parameter = entry.value();
    if (!parameter.defined() || !parameter.requires_grad() || find_owner(parameter).unit) continue;
    if (left.insert(parameter.unsafeGetTensorImpl()).second) names.push_back(entry.key());
  }
  return names;
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
  log(LogLevel::warning,
      "parameter '" + names.front() + "'" +
          (names.size() > 1 ? " and " + std::to_string(names.size() - 1) + " more are" : " is") +
          " in no unit: nobody averages the gradients over the ranks, every rank trains values of "
          "its own, and a checkpoint gets those of one. Call fully_shard on the outermost module "
          "too, or name in ignored_parameters what is meant to stay out");
}

}  // namespace tessera::detail
