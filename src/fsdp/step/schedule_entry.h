// ScheduleEntry: what the schedule keeps of one unit: its root, what the user asked for, and where
// the unit is in the pass that is under way.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "fsdp/unit/unit.h"

namespace tessera::detail {

class Root;

struct ScheduleEntry final : UnitSchedule {
  [[nodiscard]] bool is_quiet() const override;

  // Between its last backward and its next forward.
  [[nodiscard]] bool stays_gathered() const noexcept { return is_kept || pinned; }

  std::shared_ptr<Root> root;  // null until the first forward
  int id = 0;                  // place in the root's list, the same on every rank

  // What the user asked for.
  bool pinned = false;                 // unshard() was called: it stays gathered until reshard()
  bool sync_gradients = true;          // its backward reduces; otherwise the gradients are kept
  bool begins_step = true;             // of the next forward, for DistributedDataParallel
  bool sync_replicas = true;           // a reduction goes over the copies too
  bool unshard_in_backward = true;     // its backward needs the parameters
  bool uneven_micro_batches = false;   // ranks may differ in backwards that do not reduce
  std::optional<int> reduction_limit;  // buffers of reductions at once
  std::uint64_t keep_bytes = 0;        // of units that stay gathered; of the root's own
  // What to gather next.
  std::vector<std::weak_ptr<Unit>> forward_prefetch, backward_prefetch;

  // The pass that is under way.
  bool is_within_budget = false;         // keep_bytes of the root are enough for it
  bool is_kept = false;                  // it stays gathered from the last backward on
  std::size_t modules_to_run = 0;        // of several modules; 0: none was called yet
  int backwards_due = 0;                 // forwards whose backward has not come yet
  std::weak_ptr<Unit> next_in_backward;  // whose forward ended before this one's

  bool has_warned_of_views = false;
};

// Every unit gets its entry when it is made (wrap/shard_module.cpp).
[[nodiscard]] inline ScheduleEntry& entry_of(const Unit& unit) {
  return static_cast<ScheduleEntry&>(unit.schedule());
}

}  // namespace tessera::detail
