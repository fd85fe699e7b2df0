// Messages between ranks: numbers and texts, one after another, little end first.
//
// What a struct has in a message is said once, beside it, and writing and reading follow from that:
//
//   struct Opening {
//     std::string save_id;
//     IfDiffers copies = IfDiffers::warn;
//   };
//   auto fields(FieldsOf<Opening> auto& opening) {
//     return std::tie(opening.save_id, opening.copies);
//   }
//
//   const Bytes message = to_message(opening);
//   const auto same = from_message<Opening>(message);
//
// A field is a number, a truth value, an enum that has last_of(), a text, bytes, an Error, a pair,
// an optional, a vector, a map, or a struct that has fields().
#pragma once

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/numbers.h"
#include "tessera/comm.h"
#include "tessera/error.h"
#include "tessera/layout.h"

namespace tessera {

// Code, message, path, key, offset and the failures of peers.
[[nodiscard]] Bytes encode_error(const Error& error);
// Throws `corrupt` for bytes that encode_error did not make.
[[nodiscard]] Error decode_error(std::span<const std::byte> bytes);

// A struct that is written, or read into.
template <typename T, typename Struct>
concept FieldsOf = std::same_as<std::remove_const_t<T>, Struct>;

template <typename T>
concept HasFields = requires(T& value) {
  fields(value);
};

// The highest value of an enum of one byte: a message that has a higher one is damaged.
constexpr bool last_of(bool) {
  return true;
}
inline DType last_of(DType) {
  return dtype_table().back().dtype;
}
template <typename T>
concept IsChoice = sizeof(T) == 1 && (std::is_enum_v<T> || std::same_as<T, bool>);
template <typename T>
concept IsNumber = std::is_arithmetic_v<T> && !IsChoice<T>;

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
  // A field. Numbers have all their bytes; in front of what varies in length stands its size.
  template <IsNumber T>
  MessageWriter& value(T value) {
    return number(value);
  }
  template <IsChoice T>
  MessageWriter& value(T value) {
    return number(static_cast<std::uint8_t>(value));
  }
  MessageWriter& value(const std::string& value) { return text(value); }
  MessageWriter& value(const Bytes& value) { return block(value); }
  MessageWriter& value(const Error& value) { return block(encode_error(value)); }
  template <typename First, typename Second>
  MessageWriter& value(const std::pair<First, Second>& pair) {
    return value(pair.first).value(pair.second);
  }
  template <typename T>
  MessageWriter& value(const std::optional<T>& optional) {
    value(optional.has_value());
    return optional ? value(*optional) : *this;
  }
  template <typename T>
  MessageWriter& value(const std::vector<T>& values) {
    count(values.size());
    for (const T& one : values) value(one);
    return *this;
  }
  template <typename Key, typename T>
  MessageWriter& value(const std::map<Key, T>& values) {
    count(values.size());
    for (const auto& one : values) value(one);
    return *this;
  }
  template <HasFields T>
  MessageWriter& value(const T& value) {
    std::apply([this](const auto&... each) { (this->value(each), ...); }, fields(value));
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
  // So many bytes, without a size in front of them.
  std::span<const std::byte> bytes(std::size_t size) { return take(size); }
  std::string text() {
    const auto bytes = block();
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }
  // What the writer's value() has written. Throws `corrupt` for an enum that is none too, and for
  // more elements than bytes are left.
  template <typename T>
  [[nodiscard]] T value() {
    if constexpr (std::same_as<T, Error>) {
      return decode_error(block());
    } else {
      T value{};
      read(value);
      return value;
    }
  }
  [[nodiscard]] std::span<const std::byte> rest() const { return rest_; }
  [[nodiscard]] bool at_end() const { return rest_.empty(); }

 private:
  template <IsNumber T>
  void read(T& value) {
    value = number<T>();
  }
  template <IsChoice T>
  void read(T& value) {
    const auto choice = number<std::uint8_t>();
    if (choice > static_cast<std::uint8_t>(last_of(T{}))) {
      throw Error(ErrorCode::corrupt,
                  "a message between ranks has the unknown choice " + std::to_string(choice));
    }
    value = static_cast<T>(choice);
  }
  void read(std::string& value) { value = text(); }
  void read(Bytes& value) {
    const auto bytes = block();
    value.assign(bytes.begin(), bytes.end());
  }
  template <typename First, typename Second>
  void read(std::pair<First, Second>& pair) {
    read(pair.first);
    read(pair.second);
  }
  template <typename T>
  void read(std::optional<T>& optional) {
    if (value<bool>()) optional.emplace(value<T>());
  }
  template <typename T>
  void read(std::vector<T>& values) {
    std::uint64_t left = elements();
    values.reserve(std::min<std::size_t>(left, rest_.size() / sizeof(T)));
    for (; left > 0; --left) values.push_back(value<T>());
  }
  template <typename Key, typename T>
  void read(std::map<Key, T>& values) {
    for (auto left = elements(); left > 0; --left)
      values.insert(values.end(), value<std::pair<Key, T>>());
  }
  template <HasFields T>
  void read(T& value) {
    std::apply([this](auto&... each) { (read(each), ...); }, fields(value));
  }
  // Each has a byte or more.
  std::uint64_t elements() {
    const std::uint64_t number = count();
    require(number);
    return number;
  }

  void require(std::uint64_t size) const {
    if (size <= rest_.size()) return;
    throw Error(ErrorCode::corrupt,
                "a message between ranks ends early: " + std::to_string(rest_.size()) +
                    " bytes are left, " + std::to_string(size) + " are needed");
  }
  std::span<const std::byte> take(std::size_t size) {
    require(size);
    const auto taken = rest_.first(size);
    rest_ = rest_.subspan(size);
    return taken;
  }

  std::span<const std::byte> rest_;
};

// A message of one value.
template <typename T>
[[nodiscard]] Bytes to_message(const T& value) {
  return MessageWriter().value(value).take();
}
// Throws `corrupt` for what to_message() did not make of a T.
template <typename T>
[[nodiscard]] T from_message(std::span<const std::byte> bytes) {
  MessageReader message(bytes);
  T value = message.value<T>();
  if (message.at_end()) return value;
  throw Error(ErrorCode::corrupt, "a message between ranks has bytes after its end");
}
// The values of a message in which several stand side by side.
template <typename T>
[[nodiscard]] std::vector<T> all_from_message(std::span<const std::byte> bytes) {
  std::vector<T> all;
  for (MessageReader message(bytes); !message.at_end();) all.push_back(message.value<T>());
  return all;
}

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
