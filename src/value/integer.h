// Integers of any size: normal form, text, numbers.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "tessera/value.h"

namespace tessera {

// From two's complement, little end first, of any length (empty: 0). The result is in normal form:
// `big` is used only outside 64 bits and is as short as possible.
[[nodiscard]] Integer integer_from_bytes(std::span<const std::byte> bytes);
// The shortest two's complement, little end first; empty for 0.
[[nodiscard]] std::vector<std::byte> integer_to_bytes(const Integer& integer);

// Decimal text with an optional sign. Throws `corrupt` for anything else and `limit` above 4300
// digits.
[[nodiscard]] Integer integer_from_decimal(std::string_view text);
// Integers too long to be useful as digits become "<integer of N bytes>".
#pragma GCC visibility push(default)  // the command links it, see cmake/TesseraShared.cmake
[[nodiscard]] std::string to_decimal(const Integer& integer);
#pragma GCC visibility pop
[[nodiscard]] double to_real(const Integer& integer);

}  // namespace tessera
