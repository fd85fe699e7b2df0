#include "tessera/param_groups.h"

#include <string>

#include "optim/fields.h"
#include "tessera/error.h"

namespace tessera {
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
