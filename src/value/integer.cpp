#include "value/integer.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "tessera/error.h"

namespace tessera {
namespace {

constexpr std::size_t kMaxDigits = 4300;       // as in Python
constexpr std::size_t kMaxPrintedBytes = 256;  // longer ones are only described
constexpr std::uint32_t kBillion = 1'000'000'000;

// Whether a two's complement number, little end first, is below 0.
bool is_negative(std::span<const std::byte> bytes) {
  return !bytes.empty() && (bytes.back() & std::byte{0x80}) != std::byte{0};
}

// The byte that extends a number of that sign.
std::byte sign_byte(bool negative) {
  return negative ? std::byte{0xff} : std::byte{0};
}

// Magnitude in 32-bit limbs, little end first, of a two's complement number.
std::vector<std::uint32_t> magnitude(std::span<const std::byte> bytes, bool negative) {
  std::vector<std::uint32_t> limbs((bytes.size() + 3) / 4 + 1);
  std::uint32_t carry = negative ? 1 : 0;
  const std::byte sign = sign_byte(negative);
  for (std::size_t i = 0; i < limbs.size() * 4; ++i) {
    const std::byte byte = i < bytes.size() ? bytes[i] : sign;
    std::uint32_t digit = std::to_integer<std::uint32_t>(negative ? ~byte : byte) + carry;
    carry = digit >> 8U;
    limbs[i / 4] |= (digit & 0xffU) << (8 * (i % 4));
  }
  return limbs;
}

// bytes * factor + carry, little end first; returns what does not fit.
std::uint32_t multiply_add(std::vector<std::byte>& bytes, std::uint32_t factor,
                           std::uint32_t carry) {
  for (std::byte& byte : bytes) {
    carry += std::to_integer<std::uint32_t>(byte) * factor;
    byte = static_cast<std::byte>(carry & 0xffU);
    carry >>= 8U;
  }
  return carry;
}

// The last byte can go when it only repeats the sign of the one before.
std::span<const std::byte> shortest(std::span<const std::byte> bytes) {
  const std::byte sign = sign_byte(is_negative(bytes));
  while (bytes.size() > 1 && bytes.back() == sign &&
         ((bytes[bytes.size() - 2] ^ sign) & std::byte{0x80}) == std::byte{0}) {
    bytes = bytes.first(bytes.size() - 1);
  }
  return bytes;
}

// The number in at most 8 bytes.
std::int64_t small_from_bytes(std::span<const std::byte> bytes) {
  std::uint64_t bits = is_negative(bytes) ? ~std::uint64_t{0} : 0;
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    bits &= ~(std::uint64_t{0xff} << (8 * i));
    bits |= std::to_integer<std::uint64_t>(bytes[i]) << (8 * i);
  }
  return static_cast<std::int64_t>(bits);
}

void require_digits(std::string_view digits) {
  if (digits.empty() || digits.find_first_not_of("0123456789") != std::string_view::npos) {
    throw Error(ErrorCode::corrupt, "found text that is not an integer, expected decimal digits");
  }
  if (digits.size() > kMaxDigits) {
    throw Error(ErrorCode::limit, "an integer of " + std::to_string(digits.size()) +
                                      " digits, expected at most " + std::to_string(kMaxDigits));
  }
}

// A number without a sign, little end first; the last byte is 0.
std::vector<std::byte> bytes_of_digits(std::string_view digits) {
  std::vector<std::byte> bytes;
  for (const char digit : digits) {
    const std::uint32_t carry = multiply_add(bytes, 10, static_cast<std::uint32_t>(digit - '0'));
    if (carry != 0) bytes.push_back(static_cast<std::byte>(carry));
  }
  bytes.push_back(std::byte{0});
  return bytes;
}

void negate(std::vector<std::byte>& bytes) {
  for (std::byte& byte : bytes) byte = ~byte;
  multiply_add(bytes, 1, 1);
}

// Divides by kBillion, without zeros at the end of what is left; returns the rest.
std::uint64_t divide(std::vector<std::uint32_t>& limbs) {
  std::uint64_t rest = 0;
  for (auto limb = limbs.rbegin(); limb != limbs.rend(); ++limb) {
    rest = (rest << 32U) | *limb;
    *limb = static_cast<std::uint32_t>(rest / kBillion);
    rest %= kBillion;
  }
  while (!limbs.empty() && limbs.back() == 0) limbs.pop_back();
  return rest;
}

}  // namespace

Integer integer_from_bytes(std::span<const std::byte> bytes) {
  const std::span<const std::byte> kept = shortest(bytes);
  Integer integer;
  if (kept.size() > 8) {
    integer.big.assign(kept.begin(), kept.end());
  } else {
    integer.small = small_from_bytes(kept);
  }
  return integer;
}

std::vector<std::byte> integer_to_bytes(const Integer& integer) {
  if (!integer.big.empty()) return integer.big;
  std::vector<std::byte> bytes;
  const bool negative = integer.small < 0;
  auto rest = integer.small;
  while (rest != (negative ? -1 : 0)) {
    bytes.push_back(static_cast<std::byte>(rest & 0xff));
    rest >>= 8;
  }
  if (is_negative(bytes) != negative) bytes.push_back(sign_byte(negative));
  return bytes;
}

Integer integer_from_decimal(std::string_view text) {
  std::string_view digits = text;
  const bool negative = digits.starts_with('-');
  if (negative || digits.starts_with('+')) digits.remove_prefix(1);
  require_digits(digits);
  std::vector<std::byte> bytes = bytes_of_digits(digits);
  if (negative) negate(bytes);
  return integer_from_bytes(bytes);
}

std::string to_decimal(const Integer& integer) {
  if (integer.big.empty()) return std::to_string(integer.small);
  if (integer.big.size() > kMaxPrintedBytes) {
    return "<integer of " + std::to_string(integer.big.size()) + " bytes>";
  }
  const bool negative = is_negative(integer.big);
  auto limbs = magnitude(integer.big, negative);
  std::string text;  // backwards
  while (!limbs.empty()) {
    std::uint64_t rest = divide(limbs);
    for (int digit = 0; digit < 9 && (rest != 0 || !limbs.empty()); ++digit) {
      text.push_back(static_cast<char>('0' + rest % 10));
      rest /= 10;
    }
  }
  if (negative) text.push_back('-');
  std::reverse(text.begin(), text.end());
  return text;
}

double to_real(const Integer& integer) {
  if (integer.big.empty()) return static_cast<double>(integer.small);
  const bool negative = is_negative(integer.big);
  const auto limbs = magnitude(integer.big, negative);
  double real = 0;
  for (auto limb = limbs.rbegin(); limb != limbs.rend(); ++limb) real = real * 0x1p32 + *limb;
  return negative ? -real : real;
}

}  // namespace tessera
