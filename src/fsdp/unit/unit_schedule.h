// UnitSchedule: what a unit knows of the schedule that drives it. The schedule keeps what it has to
// know of the unit in a class derived from this one (step/root.h), so units know nothing
// of order, hooks or other units.
#pragma once

namespace tessera::detail {

class UnitSchedule {
 public:
  virtual ~UnitSchedule() = default;
  // No forward and no backward of the unit's model is under way.
  [[nodiscard]] virtual bool is_quiet() const = 0;
};

}  // namespace tessera::detail
