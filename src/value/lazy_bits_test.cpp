// torch's conjugate and negative bits (issue 15, 3.1).
#include "value/lazy_bits.h"

#include <gtest/gtest.h>

#include <complex>
#include <vector>

#include "conformance/errors.h"

namespace tessera {
namespace {

Piece bits(bool conj, bool neg) {
  Piece piece;
  piece.conj = conj;
  piece.neg = neg;
  return piece;
}

template <typename Element>
std::vector<Element> resolved(bool conj, bool neg, DType dtype, std::vector<Element> elements) {
  resolve_bits(bits(conj, neg), dtype, reinterpret_cast<std::byte*>(elements.data()),
               static_cast<std::int64_t>(elements.size()));
  return elements;
}

TEST(LazyBits, OfComplexNumbers) {
  using C = std::complex<double>;
  const std::vector<C> given = {{1, 2}, {-3, 0.5}};
  EXPECT_EQ(resolved(false, false, DType::complex128, given), given);
  EXPECT_EQ(resolved(true, false, DType::complex128, given), (std::vector<C>{{1, -2}, {-3, -0.5}}));
  EXPECT_EQ(resolved(false, true, DType::complex128, given), (std::vector<C>{{-1, -2}, {3, -0.5}}));
  EXPECT_EQ(resolved(true, true, DType::complex128, given), (std::vector<C>{{-1, 2}, {3, 0.5}}));
}

TEST(LazyBits, OfRealNumbersAndIntegers) {
  EXPECT_EQ(resolved<float>(true, false, DType::float32, {1, -2}), (std::vector<float>{1, -2}));
  EXPECT_EQ(resolved<float>(false, true, DType::float32, {1, -2}), (std::vector<float>{-1, 2}));
  EXPECT_EQ(resolved<std::uint16_t>(false, true, DType::bfloat16, {0x3f80, 0x8000}),
            (std::vector<std::uint16_t>{0xbf80, 0}));
  EXPECT_EQ(resolved<std::int64_t>(false, true, DType::int64, {5, INT64_MIN}),
            (std::vector<std::int64_t>{-5, INT64_MIN}));
  EXPECT_EQ(resolved<std::int8_t>(false, true, DType::int8, {5, -128, 0}),
            (std::vector<std::int8_t>{-5, -128, 0}));
  EXPECT_EQ(resolved<std::uint8_t>(false, true, DType::uint8, {5, 0}),
            (std::vector<std::uint8_t>{251, 0}));
}

TEST(LazyBits, TypesWithoutNegativesAreRefused) {
  EXPECT_EQ(code_of([] { resolved<std::uint8_t>(false, true, DType::bool8, {1}); }),
            ErrorCode::unsupported);
  EXPECT_EQ(code_of([] { resolved<std::uint8_t>(false, true, DType::float8_e4m3fn, {1}); }),
            ErrorCode::unsupported);
}

}  // namespace
}  // namespace tessera
