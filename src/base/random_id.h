// Names that no other process picks.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace tessera {

// One attempt at writing something, in lower-case hex digits.
inline constexpr std::size_t kAttemptDigits = 12;
[[nodiscard]] std::string random_attempt();
// Whether random_attempt() could have written `text`.
[[nodiscard]] bool is_attempt(std::string_view text);

// A version 4 UUID, as torch names a save.
[[nodiscard]] std::string random_uuid();

}  // namespace tessera
