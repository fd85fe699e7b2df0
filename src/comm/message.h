// Messages between ranks: numbers and texts, one after another, little end first.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/numbers.h"
#include "tessera/comm.h"

namespace tessera {

class MessageWriter {
 public:
  template <typename T>
  MessageWriter& number(T value) {
    append_le(bytes_, value);
    return *this;
  }
  // A number from 0 up, in as few bytes as it needs: seven bits each, the lowest first.
  MessageWriter& count(std::uint64_t value) {
    for (; value >= 0x80; value >>= 7) number(static_cast<std::uint8_t>(value | 0x80));
    return number(static_cast<std::uint8_t>(value));
  }
  MessageWriter& text(std::string_view text) {
    return block(std::as_bytes(std::span(text.data(), text.size())));
  }
  // Their number and each of them.
  MessageWriter& texts(std::span<const std::string> texts) {
    count(texts.size());
    for (const std::string& one : texts) text(one);
    return *this;
  }
  // Its size and the bytes.
  MessageWriter& block(std::span<const std::byte> bytes) {
    number(narrow<std::uint32_t>(bytes.size()));
    bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
    return *this;
  }
  // Bytes that reach to the message's end.
  MessageWriter& rest(std::span<const std::byte> bytes) {
    bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
    return *this;
  }
  [[nodiscard]] std::size_t size() const noexcept { return bytes_.size(); }
  [[nodiscard]] Bytes take() { return std::move(bytes_); }

 private:
  Bytes bytes_;
};

// Every member throws `corrupt` if the message ends before what it is asked for.
class MessageReader {
 public:
  explicit MessageReader(std::span<const std::byte> message) : rest_(message) {}

  template <typename T>
  T number() {
    return load_le<T>(take(sizeof(T)).data());
  }
  std::uint64_t count() {
    std::uint64_t value = 0;
    for (unsigned shift = 0; shift < 64; shift += 7) {
      const auto byte = number<std::uint8_t>();
      value |= static_cast<std::uint64_t>(byte & 0x7f) << shift;
      if (byte < 0x80) return value;
    }
    throw Error(ErrorCode::corrupt, "a message between ranks has a number of more than 64 bits");
  }
  std::span<const std::byte> block() { return take(number<std::uint32_t>()); }
  std::vector<std::string> texts() {
    std::vector<std::string> texts;
    for (auto count = this->count(); count > 0; --count) texts.push_back(text());
    return texts;
  }
  // So many bytes, without a size in front of them.
  std::span<const std::byte> bytes(std::size_t size) { return take(size); }
  std::string text() {
    const auto bytes = block();
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }
  [[nodiscard]] std::span<const std::byte> rest() const { return rest_; }
  [[nodiscard]] bool at_end() const { return rest_.empty(); }

 private:
  std::span<const std::byte> take(std::size_t size) {
    if (size > rest_.size()) {
      throw Error(ErrorCode::corrupt,
                  "a message between ranks ends early: " + std::to_string(rest_.size()) +
                      " bytes are left, " + std::to_string(size) + " are needed");
    }
    const auto taken = rest_.first(size);
    rest_ = rest_.subspan(size);
    return taken;
  }

  std::span<const std::byte> rest_;
};

// Messages that are read one after another combine by standing side by side.
[[nodiscard]] inline Bytes side_by_side(Bytes left, const Bytes& right) {
  left.insert(left.end(), right.begin(), right.end());
  return left;
}

// Text as a Group's message, and back.

inline Bytes to_bytes(std::string_view text) {
  const auto* begin = reinterpret_cast<const std::byte*>(text.data());
  return {begin, begin + text.size()};
}

inline std::string to_text(const Bytes& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace tessera
