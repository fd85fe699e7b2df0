// As FIPS 180-4 has it; the names are its names.
#include "base/sha.h"

#include <algorithm>
#include <bit>

#include <fmt/format.h>

namespace tessera {
namespace {

constexpr std::size_t kRounds256 = 64, kRounds1 = 80;

constexpr std::array<std::uint32_t, kRounds256> kK = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

constexpr std::array<std::uint32_t, 8> kBegin1 = {0x67452301, 0xefcdab89, 0x98badcfe, 0x10325476,
                                                  0xc3d2e1f0, 0,          0,          0};
constexpr std::array<std::uint32_t, 8> kBegin256 = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

using State = std::array<std::uint32_t, 8>;

std::uint32_t word_at(const std::byte* block, std::size_t at) {
  std::uint32_t word = 0;
  for (std::size_t i = 0; i < 4; ++i)
    word = word << 8U | std::to_integer<std::uint32_t>(block[4 * at + i]);
  return word;
}

void add_block_256(State& state, const std::byte* block) {
  std::array<std::uint32_t, kRounds256> w{};
  for (std::size_t t = 0; t < 16; ++t) w[t] = word_at(block, t);
  for (std::size_t t = 16; t < kRounds256; ++t) {
    const std::uint32_t s0 = std::rotr(w[t - 15], 7) ^ std::rotr(w[t - 15], 18) ^ w[t - 15] >> 3U;
    const std::uint32_t s1 = std::rotr(w[t - 2], 17) ^ std::rotr(w[t - 2], 19) ^ w[t - 2] >> 10U;
    w[t] = w[t - 16] + s0 + w[t - 7] + s1;
  }
  auto [a, b, c, d, e, f, g, h] = state;
  for (std::size_t t = 0; t < kRounds256; ++t) {
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

// The function and the constant of round t of SHA-1.
std::uint32_t mixed(std::size_t t, std::uint32_t b, std::uint32_t c, std::uint32_t d) {
  if (t < 20) return ((b & c) ^ (~b & d)) + 0x5a827999;
  if (t < 40) return (b ^ c ^ d) + 0x6ed9eba1;
  if (t < 60) return ((b & c) ^ (b & d) ^ (c & d)) + 0x8f1bbcdc;
  return (b ^ c ^ d) + 0xca62c1d6;
}

void add_block_1(State& state, const std::byte* block) {
  std::array<std::uint32_t, kRounds1> w{};
  for (std::size_t t = 0; t < 16; ++t) w[t] = word_at(block, t);
  for (std::size_t t = 16; t < kRounds1; ++t)
    w[t] = std::rotl(w[t - 3] ^ w[t - 8] ^ w[t - 14] ^ w[t - 16], 1);
  std::uint32_t a = state[0], b = state[1], c = state[2], d = state[3], e = state[4];
  for (std::size_t t = 0; t < kRounds1; ++t) {
    const std::uint32_t next = std::rotl(a, 5) + mixed(t, b, c, d) + e + w[t];
    e = d;
    d = c;
    c = std::rotl(b, 30);
    b = a;
    a = next;
  }
  const std::array<std::uint32_t, 5> round = {a, b, c, d, e};
  for (std::size_t i = 0; i < round.size(); ++i) state[i] += round[i];
}

}  // namespace

RunningSha::RunningSha(Sha kind) : kind_(kind), state_(kind == Sha::sha1 ? kBegin1 : kBegin256) {}

void RunningSha::add_block(const std::byte* block) {
  kind_ == Sha::sha1 ? add_block_1(state_, block) : add_block_256(state_, block);
}

void RunningSha::add(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const auto filled = static_cast<std::size_t>(size_ % kBlock);
    const std::size_t part = std::min(bytes.size(), kBlock - filled);
    if (part == kBlock) {
      add_block(bytes.data());
    } else {
      std::ranges::copy(bytes.first(part), rest_.begin() + static_cast<std::ptrdiff_t>(filled));
      if (filled + part == kBlock) add_block(rest_.data());
    }
    bytes = bytes.subspan(part);
    size_ += part;
  }
}

// A one bit, zeros, and the number of bits follow the bytes, to the end of a block.
std::string RunningSha::text() const {
  RunningSha padded = *this;
  const std::byte one{0x80}, zero{0};
  padded.add({&one, 1});
  while (padded.size_ % kBlock != kBlock - sizeof(std::uint64_t)) padded.add({&zero, 1});
  for (int shift = 56; shift >= 0; shift -= 8) {
    const auto byte = static_cast<std::byte>(size_ * 8 >> static_cast<unsigned>(shift) & 0xFFU);
    padded.add({&byte, 1});
  }
  std::string digits;
  const std::size_t words = kind_ == Sha::sha1 ? 5 : 8;
  for (std::size_t i = 0; i < words; ++i) digits += fmt::format("{:08x}", padded.state_[i]);
  return digits;
}

std::string sha256_text(std::string_view text) {
  RunningSha sha(Sha::sha256);
  sha.add(std::as_bytes(std::span(text)));
  return sha.text();
}

}  // namespace tessera
