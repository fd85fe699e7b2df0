// Digests of blocks: XXH3 with 64 bits. They find damage, not forgery.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace tessera {

[[nodiscard]] std::uint64_t digest64(std::span<const std::byte> bytes);

// The digest of bytes that come in parts, one after another.
class RunningDigest {
 public:
  RunningDigest();
  void add(std::span<const std::byte> bytes);
  [[nodiscard]] std::uint64_t value() const;

 private:
  struct Free {
    void operator()(void* state) const;
  };
  std::unique_ptr<void, Free> state_;  // an XXH3_state_t
};

inline constexpr std::size_t kDigestDigits = 16;
// 16 lower-case hex digits, the highest first, and back. Anything else is `corrupt`.
[[nodiscard]] std::string digest_text(std::uint64_t digest);
[[nodiscard]] std::uint64_t digest_of_text(std::string_view digits);

}  // namespace tessera
