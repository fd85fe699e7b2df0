// Lists in messages.
#pragma once

#include <string>
#include <vector>

namespace tessera::detail {

// "a, b, c".
[[nodiscard]] inline std::string joined(const std::vector<std::string>& texts) {
  std::string all;
  for (const auto& text : texts) all += (all.empty() ? "" : ", ") + text;
  return all;
}

}  // namespace tessera::detail
