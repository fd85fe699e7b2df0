// GGUF files that tests make by hand.
#pragma once

#include <concepts>
#include <cstdint>
#include <string>
#include <vector>

#include "base/numbers.h"

namespace tessera::gguf::test {

// Numbers in the order of the file, and texts with their lengths.
class Bytes {
 public:
  template <std::integral T>
  Bytes& add(T number) {
    append_le(bytes_, number);
    return *this;
  }
  Bytes& u32(std::uint32_t number) { return add(number); }
  Bytes& u64(std::uint64_t number) { return add(number); }
  Bytes& raw(const std::string& text) {
    for (const char c : text) bytes_.push_back(static_cast<std::byte>(c));
    return *this;
  }
  Bytes& text(const std::string& text) { return u64(text.size()).raw(text); }
  Bytes& zeros(std::size_t count) { return raw(std::string(count, '\0')); }
  Bytes& pad(std::size_t alignment) {
    return zeros((alignment - bytes_.size() % alignment) % alignment);
  }

  Bytes& head(std::uint64_t tensors, std::uint64_t values, std::uint32_t version = 3) {
    return raw("GGUF").u32(version).u64(tensors).u64(values);
  }
  Bytes& key(const std::string& name, std::uint32_t type) { return text(name).u32(type); }
  // `sizes`: innermost first, as the file has them.
  Bytes& tensor(const std::string& name, const std::vector<std::uint64_t>& sizes,
                std::uint32_t type = 0, std::uint64_t offset = 0) {
    text(name).u32(static_cast<std::uint32_t>(sizes.size()));
    for (const std::uint64_t size : sizes) u64(size);
    return u32(type).u64(offset);
  }

  operator std::vector<std::byte>() const { return bytes_; }  // NOLINT

 private:
  std::vector<std::byte> bytes_;
};

}  // namespace tessera::gguf::test
