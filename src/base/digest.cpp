#include "base/digest.h"

#include <array>
#include <bit>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <new>

#include <fmt/format.h>

// With the widest registers that the processor has, instead of those that every one has.
#if defined(__x86_64__) && __has_include(<xxh_x86dispatch.h>)
#include <xxh_x86dispatch.h>
#else
#include <xxhash.h>
#endif

#include "tessera/error.h"

namespace tessera {

namespace {

XXH3_state_t* raw(void* state) {
  return static_cast<XXH3_state_t*>(state);
}

}  // namespace

std::uint64_t digest64(std::span<const std::byte> bytes) {
  return XXH3_64bits(bytes.data(), bytes.size());
}

RunningDigest::RunningDigest() : state_(XXH3_createState()) {
  if (!state_) throw std::bad_alloc();
  XXH3_64bits_reset(raw(state_.get()));
}

void RunningDigest::Free::operator()(void* state) const {
  XXH3_freeState(raw(state));
}

void RunningDigest::add(std::span<const std::byte> bytes) {
  XXH3_64bits_update(raw(state_.get()), bytes.data(), bytes.size());
}

std::uint64_t RunningDigest::value() const {
  return XXH3_64bits_digest(raw(state_.get()));
}

std::string digest_text(std::uint64_t digest) {
  return fmt::format("{:016x}", digest);
}

std::uint64_t digest_of_text(std::string_view digits) {
  std::uint64_t digest = 0;
  const auto [end, error] =
      std::from_chars(digits.data(), digits.data() + digits.size(), digest, 16);
  const bool lower = digits.find_first_not_of("0123456789abcdef") == std::string_view::npos;
  if (digits.size() != kDigestDigits || !lower || error != std::errc() ||
      end != digits.data() + digits.size()) {
    throw Error(ErrorCode::corrupt, "a digest is not 16 lower-case hex digits");
  }
  return digest;
}

// As FIPS 180-4 has it; the names are its names.

namespace {

constexpr std::size_t kBlock = 64, kRounds = 64;
using State = std::array<std::uint32_t, 8>;

constexpr std::array<std::uint32_t, kRounds> kK = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

// The text, a one bit, zeros, and the number of its bits: whole blocks.
std::string padded(std::string_view text) {
  std::string message(text);
  message += '\x80';
  while (message.size() % kBlock != kBlock - sizeof(std::uint64_t)) message += '\0';
  const std::uint64_t bits = std::uint64_t{text.size()} * 8;
  for (int shift = 56; shift >= 0; shift -= 8) message += static_cast<char>(bits >> shift & 0xFFU);
  return message;
}

std::uint32_t word_at(std::string_view block, std::size_t at) {
  std::uint32_t word = 0;
  for (std::size_t i = 0; i < 4; ++i)
    word = word << 8U | static_cast<unsigned char>(block[4 * at + i]);
  return word;
}

void add_block(State& state, std::string_view block) {
  std::array<std::uint32_t, kRounds> w{};
  for (std::size_t t = 0; t < 16; ++t) w[t] = word_at(block, t);
  for (std::size_t t = 16; t < kRounds; ++t) {
    const std::uint32_t s0 = std::rotr(w[t - 15], 7) ^ std::rotr(w[t - 15], 18) ^ w[t - 15] >> 3U;
    const std::uint32_t s1 = std::rotr(w[t - 2], 17) ^ std::rotr(w[t - 2], 19) ^ w[t - 2] >> 10U;
    w[t] = w[t - 16] + s0 + w[t - 7] + s1;
  }
  auto [a, b, c, d, e, f, g, h] = state;
  for (std::size_t t = 0; t < kRounds; ++t) {
    const std::uint32_t sum1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
    const std::uint32_t t1 = h + sum1 + ((e & f) ^ (~e & g)) + kK[t] + w[t];
    const std::uint32_t sum0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
    const std::uint32_t t2 = sum0 + ((a & b) ^ (a & c) ^ (b & c));
    h = g;
    g = f;
    f = e;
    e = d + t1;
    d = c;
    c = b;
    b = a;
    a = t1 + t2;
  }
  const State round = {a, b, c, d, e, f, g, h};
  for (std::size_t i = 0; i < state.size(); ++i) state[i] += round[i];
}

}  // namespace

std::string sha256_text(std::string_view text) {
  State state = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  const std::string message = padded(text);
  for (std::size_t at = 0; at < message.size(); at += kBlock)
    add_block(state, std::string_view(message).substr(at, kBlock));
  std::string digits;
  for (const std::uint32_t word : state) digits += fmt::format("{:08x}", word);
  return digits;
}

}  // namespace tessera
