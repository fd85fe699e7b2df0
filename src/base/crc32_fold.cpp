// The method is that of Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ
// Instruction" (Intel, 2009): 16 rows of 128 bits are kept, and each is multiplied by the power of
// x that moves it 2,048 bits on, modulo the polynomial, where the next bytes are added. Bits are
// reflected, as in all of CRC-32.
#include "base/crc32_fold.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tessera {

#if defined(__x86_64__)

// GCC 12's header begins some results with a register as it is.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"

namespace {

// x^n modulo the polynomial, reflected, and as a factor of a product of 64 bits.
constexpr std::uint64_t power(int n) {
  std::uint64_t value = 0x80000000;
  for (; n > 0; --n) value = value >> 1U ^ ((value & 1U) != 0 ? 0xEDB88320U : 0U);
  return value << 1U;
}
static_assert(power(4 * 128 + 32) == 0x154442BD4);  // that of the paper, for 512 bits

constexpr int kBits = 8 * static_cast<int>(kFoldedBytes);
constexpr std::size_t kRow = 64;  // bytes of a register

// A row 2,048 bits on, and the bytes that are there.
__attribute__((target("avx512f,vpclmulqdq"))) inline __m512i moved(__m512i row, __m512i factors,
                                                                   const std::byte* next) {
  const __m512i low = _mm512_clmulepi64_epi128(row, factors, 0x00);
  const __m512i high = _mm512_clmulepi64_epi128(row, factors, 0x11);
  constexpr int kExclusiveOr = 0x96;
  return _mm512_ternarylogic_epi64(low, high, _mm512_loadu_si512(next), kExclusiveOr);
}

}  // namespace

bool can_fold_crc32() noexcept {
  return __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("vpclmulqdq") != 0;
}

__attribute__((target("avx512f,vpclmulqdq"))) std::size_t fold_crc32(
    std::span<const std::byte> bytes, std::uint32_t crc,
    std::span<std::byte, kFoldedBytes> folded) noexcept {
  const std::byte* at = bytes.data();
  const std::size_t size = bytes.size() / kFoldedBytes * kFoldedBytes;
  const __m512i factors = _mm512_broadcast_i32x4(_mm_set_epi64x(
      static_cast<long long>(power(kBits - 32)), static_cast<long long>(power(kBits + 32))));
  const __m512i begin = _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(~crc)));
  __m512i a = _mm512_xor_si512(_mm512_loadu_si512(at), begin);
  __m512i b = _mm512_loadu_si512(at + kRow);
  __m512i c = _mm512_loadu_si512(at + 2 * kRow);
  __m512i d = _mm512_loadu_si512(at + 3 * kRow);
  for (const std::byte* end = at + size; (at += kFoldedBytes) < end;) {
    a = moved(a, factors, at);
    b = moved(b, factors, at + kRow);
    c = moved(c, factors, at + 2 * kRow);
    d = moved(d, factors, at + 3 * kRow);
  }
  _mm512_storeu_si512(folded.data(), a);
  _mm512_storeu_si512(folded.data() + kRow, b);
  _mm512_storeu_si512(folded.data() + 2 * kRow, c);
  _mm512_storeu_si512(folded.data() + 3 * kRow, d);
  return size;
}

#pragma GCC diagnostic pop

#else

bool can_fold_crc32() noexcept {
  return false;
}

std::size_t fold_crc32(std::span<const std::byte>, std::uint32_t,
                       std::span<std::byte, kFoldedBytes>) noexcept {
  return 0;
}

#endif

}  // namespace tessera
