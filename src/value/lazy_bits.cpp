#include "value/lazy_bits.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <span>

#include "tessera/error.h"

namespace tessera {
namespace {

// How a type is negated.
enum class Negation : std::uint8_t { sign_bit, complement, none };

constexpr std::array kComplex{DType::complex32, DType::complex64, DType::complex128};
constexpr std::array kReal{DType::float32, DType::float64, DType::float16, DType::bfloat16};
constexpr std::array kIntegers{DType::int64, DType::int32,  DType::int16,  DType::int8,
                               DType::uint8, DType::uint16, DType::uint32, DType::uint64};

bool holds(std::span<const DType> types, DType dtype) {
  return std::ranges::find(types, dtype) != types.end();
}

Negation negation_of(DType dtype) {
  if (holds(kIntegers, dtype)) return Negation::complement;
  return holds(kReal, dtype) || holds(kComplex, dtype) ? Negation::sign_bit : Negation::none;
}

Negation required_negation(DType dtype) {
  const Negation negation = negation_of(dtype);
  if (negation != Negation::none) return negation;
  throw Error(ErrorCode::unsupported,
              "the negative of elements of type " + std::string(to_string(dtype)));
}

bool is_complex(DType dtype) {
  return holds(kComplex, dtype);
}

// Flips the sign of every number of `size` bytes, `step` bytes from one to the next.
void flip_signs(std::byte* first, std::size_t size, std::size_t step, std::int64_t count) {
  std::byte* sign = first + size - 1;  // the last of the little-endian bytes
  for (std::int64_t i = 0; i < count; ++i, sign += step) *sign ^= std::byte{0x80};
}

template <typename Unsigned>
void negate_integers(std::byte* first, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i, first += sizeof(Unsigned)) {
    Unsigned number = 0;
    std::memcpy(&number, first, sizeof number);
    number = static_cast<Unsigned>(Unsigned{0} - number);
    std::memcpy(first, &number, sizeof number);
  }
}

void negate_integers(std::byte* first, std::size_t size, std::int64_t count) {
  switch (size) {
    case 1:
      return negate_integers<std::uint8_t>(first, count);
    case 2:
      return negate_integers<std::uint16_t>(first, count);
    case 4:
      return negate_integers<std::uint32_t>(first, count);
    default:
      return negate_integers<std::uint64_t>(first, count);
  }
}

}  // namespace

void resolve_bits(const Piece& piece, DType dtype, std::byte* elements, std::int64_t count) {
  const bool conj = piece.conj && is_complex(dtype);
  if (!conj && !piece.neg) return;
  const std::size_t size = size_of(dtype);
  const Negation negation = required_negation(dtype);
  if (is_complex(dtype)) {
    const std::size_t part = size / 2;
    if (piece.neg) flip_signs(elements, part, size, count);
    if (piece.neg != conj) flip_signs(elements + part, part, size, count);
  } else if (negation == Negation::sign_bit) {
    flip_signs(elements, size, size, count);
  } else {
    negate_integers(elements, size, count);
  }
}

}  // namespace tessera
