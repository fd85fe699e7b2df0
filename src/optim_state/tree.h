// Trees of state.
#pragma once

#include "tessera/value.h"

namespace tessera::detail {

// A tree that shares nothing with this one: containers are new, tensors have memory of their own
// (spec ).
[[nodiscard]] Value deep_copy(const Value& tree);

// Whether this state has elements like its parameter; a step of no dimensions has not.
[[nodiscard]] inline bool is_shaped(const Value& value) {
  return value.is(Value::Kind::tensor) && !value.as_tensor().shape.empty();
}

}  // namespace tessera::detail
