#include "tessera/unit_controls.h"

#include <memory>
#include <string>
#include <utility>

#include "comm/message.h"
#include "comm/whereabouts.h"
#include "fsdp/step/root.h"
#include "fsdp/unit/custom_channel.h"
#include "fsdp/unit/registry.h"
#include "tessera/error.h"

namespace tessera {
namespace {

using detail::Unit;

std::shared_ptr<Unit> unit_of(ModuleRef module, const std::string& what) {
  auto unit = detail::find_unit(&module.get());
  if (unit) return unit;
  throw Error(ErrorCode::invalid_argument,
              what + " takes a module that fully_shard was applied to, got " + module.get().name());
}

std::shared_ptr<Unit> sharded_unit_of(ModuleRef module, const std::string& what) {
  auto unit = unit_of(module, what);
  if (unit->is_sharded() && !unit->params().empty()) return unit;
  throw Error(ErrorCode::invalid_argument,
              what + " takes a module whose parameters are sharded, got " + module.get().name());
}

std::vector<std::shared_ptr<Unit>> units_of(ModuleRef module, bool recurse,
                                            const std::string& what) {
  if (!recurse) return {unit_of(module, what)};
  std::vector<std::shared_ptr<Unit>> units;
  for (auto& [name, unit] : detail::units_below(module.get())) units.push_back(std::move(unit));
  if (units.empty()) unit_of(module, what);
  return units;
}

// Changes the rules of all of them, or of none.
template <typename Change>
void change_rules(const std::vector<std::shared_ptr<Unit>>& units, const Change& change) {
  std::vector<detail::AverageRules> changed;
  for (const auto& unit : units) {
    changed.push_back(unit->rules());
    change(changed.back());
    unit->require_may_set(changed.back());
  }
  for (std::size_t i = 0; i < units.size(); ++i) units[i]->set_rules(std::move(changed[i]));
}

// Ranks that keep different units would gather different ones.
void require_same_bytes(const Unit& unit, std::int64_t bytes) {
  const Purpose purpose("comparing how many bytes stay gathered");
  const auto all = unit.all_ranks().group().all_gather(to_bytes(std::to_string(bytes)));
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    throw Error(ErrorCode::mismatch, "set_keep_gathered: rank " + std::to_string(rank) +
                                         " may keep " + to_text(all[rank]) + " bytes, rank 0 " +
                                         to_text(all[0]));
  }
}

std::vector<std::weak_ptr<Unit>> prefetched(const std::vector<ModuleRef>& modules,
                                            const std::string& what) {
  std::vector<std::weak_ptr<Unit>> units;
  for (const auto& module : modules) units.push_back(unit_of(module, what));
  return units;
}

}  // namespace

void set_requires_all_reduce(ModuleRef module, bool all_reduce, bool recurse) {
  for (const auto& unit : units_of(module, recurse, "set_requires_all_reduce"))
    entry_of(*unit).sync_replicas = all_reduce;
}

void set_is_last_backward(ModuleRef module, bool is_last) {
  auto unit = unit_of(module, "set_is_last_backward");
  if (!entry_of(*unit).root) detail::Root::make(*unit);
  entry_of(*unit).root->is_last_backward = is_last;
}

void set_reshard_after_forward(ModuleRef module, bool reshard, bool recurse) {
  for (const auto& unit : units_of(module, recurse, "set_reshard_after_forward"))
    unit->options().reshard_after_forward = reshard;
}

void set_reshard_after_backward(ModuleRef module, bool reshard, bool recurse) {
  for (const auto& unit : units_of(module, recurse, "set_reshard_after_backward"))
    unit->options().reshard_after_backward = reshard;
}

void set_keep_gathered(ModuleRef model, std::int64_t bytes) {
  const std::string what = "set_keep_gathered";
  const auto unit = unit_of(model, what);
  require_same_bytes(*unit, bytes);
  auto& entry = entry_of(*unit);
  if (entry.root && entry.root->units().front() != unit) {
    throw Error(ErrorCode::invalid_argument,
                what + " takes a model's outermost module, got one that is inside")
        .at_key(unit->name());
  }
  if (bytes < 0) {
    throw Error(ErrorCode::invalid_argument,
                what + " takes a number of bytes, got " + std::to_string(bytes));
  }
  entry.keep_bytes = static_cast<std::uint64_t>(bytes);
}

void set_modules_to_forward_prefetch(ModuleRef module, const std::vector<ModuleRef>& next) {
  const std::string what = "set_modules_to_forward_prefetch";
  entry_of(*unit_of(module, what)).forward_prefetch = prefetched(next, what);
}

void set_modules_to_backward_prefetch(ModuleRef module, const std::vector<ModuleRef>& next) {
  const std::string what = "set_modules_to_backward_prefetch";
  entry_of(*unit_of(module, what)).backward_prefetch = prefetched(next, what);
}

void set_gradient_divide_factor(ModuleRef module, double factor, bool recurse) {
  detail::require_divide_factor(factor);
  change_rules(units_of(module, recurse, "set_gradient_divide_factor"),
               [factor](detail::AverageRules& rules) { rules.divisor = factor; });
}

void set_all_reduce_hook(ModuleRef module, AllReduceHook hook, bool recurse) {
  change_rules(units_of(module, recurse, "set_all_reduce_hook"),
               [&hook](detail::AverageRules& rules) {
                 rules.hook = hook ? std::make_shared<const AllReduceHook>(hook) : nullptr;
               });
}

void set_unshard_in_backward(ModuleRef module, bool unshard) {
  entry_of(*unit_of(module, "set_unshard_in_backward")).unshard_in_backward = unshard;
}

void set_reduce_scatter_max_input_buffers(ModuleRef module, int count, bool recurse) {
  if (count < 1) {
    throw Error(ErrorCode::invalid_argument,
                "set_reduce_scatter_max_input_buffers takes a number of 1 or more, got " +
                    std::to_string(count));
  }
  for (const auto& unit : units_of(module, recurse, "set_reduce_scatter_max_input_buffers"))
    entry_of(*unit).reduction_limit = count;
}

void set_custom_all_gather(ModuleRef module, Collective all_gather) {
  sharded_unit_of(module, "set_custom_all_gather")
      ->wrap_channel(detail::custom_channels(std::move(all_gather), nullptr));
}

void set_custom_reduce_scatter(ModuleRef module, Collective reduce_scatter) {
  sharded_unit_of(module, "set_custom_reduce_scatter")
      ->wrap_channel(detail::custom_channels(nullptr, std::move(reduce_scatter)));
}

UnshardHandle::UnshardHandle(std::vector<std::weak_ptr<Unit>> units) : units_(std::move(units)) {}

void UnshardHandle::wait() {
  for (const auto& weak : std::exchange(units_, {})) {
    const auto unit = weak.lock();
    if (!unit) continue;
    unit->require_own_mesh();
    unit->gather();
  }
}

UnshardHandle start_unshard(ModuleRef module) {
  std::vector<std::weak_ptr<Unit>> units;
  for (const auto& unit : units_of(module, true, "start_unshard")) {
    unit->free();  // what is gathered may be older than the shards
    unit->start_gather(/*may_change=*/true);
    unit->changes().remember();
    entry_of(*unit).pinned = true;
    units.push_back(unit);
  }
  return UnshardHandle(std::move(units));
}

}  // namespace tessera
