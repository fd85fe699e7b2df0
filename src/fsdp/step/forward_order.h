// ForwardOrder: the order in which a model's sharded units are entered (fsdp-rows EO1 to EO6).
//
// Gathers match by order alone: two ranks that enter units of equal sizes in different orders would
// compute with each other's parameters. So in the first training pass the ranks compare, before
// each gather, which unit it is for and which of its parameters are trained. Later passes are
// compared with this rank's first one, without talk; going another way is legitimate when all ranks
// do, so that warns, once. (The channels compare the unit of every gather and reduction.)
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/unit/unit.h"

namespace tessera::detail {

class ForwardOrder {
 public:
  void begin_pass(bool is_training);
  // Before the unit is gathered. Throws `mismatch` on every rank when another rank enters another
  // unit. Collective in the first training pass.
  void enter(const Unit& unit);
  void end_pass();
  // The units of the first training pass in their order, the same on every rank; of those that were
  // entered again, each time.
  [[nodiscard]] const std::vector<std::weak_ptr<const Unit>>& known() const { return known_; }
  // Forgets what was seen so far; on every rank.
  void forget() { *this = {}; }

 private:
  enum class Mode : std::uint8_t { off, first, later };

  [[nodiscard]] bool is_expected(const Unit& unit, std::size_t at) const;
  void warn(const Unit& unit);

  Mode mode_ = Mode::off;
  bool has_warned_ = false;
  bool deviates_ = false;                         // this pass does
  std::size_t entered_ = 0;                       // units of this pass
  std::vector<std::string> first_;                // names of the units of the first training pass
  std::vector<std::weak_ptr<const Unit>> known_;  // and the units
};

}  // namespace tessera::detail
