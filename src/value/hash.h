// A hash that is equal for equal values.
#pragma once

#include <cstddef>
#include <functional>
#include <string_view>

#include "tessera/value.h"

namespace tessera {

[[nodiscard]] inline std::size_t hash_of(std::string_view text) noexcept {
  return std::hash<std::string_view>{}(text);
}

// Looks at a bounded number of nodes, so that it is cheap for large and for deeply shared values.
[[nodiscard]] std::size_t hash_of(const Value& value);

}  // namespace tessera
