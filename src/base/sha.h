// SHA-1 and SHA-256: names of contents that others give, and names that nobody can make two of, or
// read back. What is signed for a server is hashed by libcrypto (storage/s3), which is quicker, but
// is not on every machine.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace tessera {

enum class Sha : std::uint8_t { sha1, sha256 };
inline constexpr std::size_t kSha1Digits = 40, kSha256Digits = 64;

// The digest of bytes that come in parts, one after another.
class RunningSha {
 public:
  explicit RunningSha(Sha kind);
  void add(std::span<const std::byte> bytes);
  [[nodiscard]] std::string text() const;  // lower-case hex digits

 private:
  static constexpr std::size_t kBlock = 64;  // bytes
  void add_block(const std::byte* block);

  Sha kind_;
  std::array<std::uint32_t, 8> state_;  // of SHA-1 the first five
  std::array<std::byte, kBlock> rest_{};
  std::uint64_t size_ =
      0;  // bytes that were added; the last of them, of no block yet, are in rest_
};

[[nodiscard]] std::string sha256_text(std::string_view text);  // lower-case hex digits

}  // namespace tessera
