#include "fsdp/wrap/forgotten.h"

#include <algorithm>
#include <string>
#include <unordered_set>
#include <utility>

#include "base/log.h"
#include "fsdp/unit/registry.h"

namespace tessera::detail {
namespace {

// What units below `module` were told to leave.
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

}  // namespace tessera::detail
