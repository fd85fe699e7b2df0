// A value among a few.
#pragma once

namespace tessera {

template <typename T, typename... Options>
[[nodiscard]] constexpr bool is_one_of(const T& value, const Options&... options) {
  return ((value == options) || ...);
}

}  // namespace tessera
