// An optimizer's own form of state, before it is loaded.
#pragma once

#include <string>

#include "tessera/optimizer_ref.h"
#include "tessera/value.h"

namespace tessera::detail {

// Throws what load_optimizer_state_dict would throw.
void check_optimizer_state_dict(const OptimizerRef& optimizer, const Value& state_dict);

// Keys of optimizer state: numbers and names in one table.

// "7" for the number, "'7'" for the name; other keys are told apart from both.
[[nodiscard]] inline std::string state_key(const Value& key) {
  switch (key.kind()) {
    case Value::Kind::integer:
      return std::to_string(key.as_int());
    case Value::Kind::string:
      return "'" + key.as_string() + "'";
    default:
      return "a key that is neither a number nor a name";
  }
}

}  // namespace tessera::detail
