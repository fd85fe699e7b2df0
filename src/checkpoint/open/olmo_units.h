// Which parameters share a flat parameter, and what FSDP calls things below its wrappers.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "tessera/olmo_save.h"
#include "tessera/storage.h"

namespace tessera {

class UnitPlan {
 public:
  // `names` in the model's order, `unit` as in OlmoOptions (not empty). The root comes first, the
  // others in order of their first parameter, a module before those inside it. Throws
  // `invalid_argument` for a malformed expression, `limit` for a name of more than 1024 bytes.
  static UnitPlan by_expression(const std::vector<std::string>& names, const std::string& unit);
  // The units of the local checkpoint in `store`, as its first rank's file lists them. Throws
  // `mismatch` when they do not hold exactly `names`.
  static UnitPlan of_local(const Store& store, const std::vector<std::string>& names);

  // Units that are known, the root first. Throws `mismatch` when they do not hold exactly `names`,
  // `invalid_argument` for a name that is not below its unit's path.
  static UnitPlan of_units(std::vector<FlatUnit> units, bool aligned,
                           const std::vector<std::string>& names);

  [[nodiscard]] const std::vector<FlatUnit>& units() const noexcept { return units_; }
  // Whether the source's flat parameters were aligned; by_expression: true.
  [[nodiscard]] bool aligned() const noexcept { return aligned_; }
  // `path` of a module or parameter as named_modules and named_parameters of the wrapped model say
  // it: "l1.weight" -> "_fsdp_wrapped_module.l1._fsdp_wrapped_module.weight"; the root's is empty.
  [[nodiscard]] std::string wrapped(const std::string& path) const;

 private:
  std::vector<FlatUnit> units_;
  std::set<std::string> modules_;  // paths of units_ but the root's
  bool aligned_ = true;
};

}  // namespace tessera
