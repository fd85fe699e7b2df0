#include "format/olmo/keys.h"

#include <algorithm>
#include <span>

#include "base/text.h"
#include "format/pickle/pickle.h"
#include "tessera/error.h"

namespace tessera::olmo {
namespace {

constexpr std::string_view kAlphabet =
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
constexpr std::size_t kLongestName = 1 << 16;  // a longer one is no name of ours

// Three bytes from the `begin`-th on, as a number; zeros behind the end.
std::uint32_t group_at(ByteView bytes, std::size_t begin) {
  std::uint32_t group = 0;
  for (std::size_t i = begin; i < begin + 3; ++i) {
    group = group << 8U | (i < bytes.size() ? std::to_integer<std::uint32_t>(bytes[i]) : 0U);
  }
  return group;
}

void append_group(std::vector<std::byte>& bytes, std::uint32_t group) {
  for (int shift = 16; shift >= 0; shift -= 8) {
    bytes.push_back(static_cast<std::byte>(group >> static_cast<unsigned>(shift) & 255U));
  }
}

std::string to_base64(ByteView bytes) {
  std::string text;
  for (std::size_t i = 0; i < bytes.size(); i += 3) {
    const std::uint32_t group = group_at(bytes, i);
    for (std::size_t j = 0; j < 4; ++j) {
      const bool padding = i + j > bytes.size();
      text += padding ? '=' : kAlphabet[group >> (18 - 6 * j) & 63U];
    }
  }
  return text;
}

bool has_base64_size(std::string_view text) {
  return !text.empty() && text.size() % 4 == 0 && text.size() <= kLongestName;
}

std::size_t padding_of(std::string_view text) {
  std::size_t padding = 0;
  while (padding < 2 && text[text.size() - 1 - padding] == '=') ++padding;
  return padding;
}

std::optional<std::vector<std::byte>> from_base64(std::string_view text) {
  if (!has_base64_size(text)) return std::nullopt;
  const std::size_t padding = padding_of(text);
  std::vector<std::byte> bytes;
  std::uint32_t group = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const bool is_padding = i >= text.size() - padding;
    const std::size_t digit = is_padding ? 0 : kAlphabet.find(text[i]);
    if (digit == std::string_view::npos) return std::nullopt;
    group = group << 6U | static_cast<std::uint32_t>(digit);
    if (i % 4 != 3) continue;
    append_group(bytes, group);
    group = 0;
  }
  bytes.resize(bytes.size() - padding);
  return bytes;
}

bool is_key(const Value& value) {
  return is_one_of(value.kind(), Value::Kind::string, Value::Kind::integer);
}

bool are_keys(const Value& value) {
  return value.is(Value::Kind::tuple) && value.size() != 0 &&
         std::ranges::all_of(value.items(), is_key);
}

// (keys, flag)
std::optional<Key> key_of(const Value& pair) {
  if (!pair.is(Value::Kind::tuple) || pair.size() != 2) return std::nullopt;
  const Value& keys = pair.items()[0];
  const Value& flag = pair.items()[1];
  if (!are_keys(keys) || !flag.is(Value::Kind::boolean)) return std::nullopt;
  return Key{keys.items(), flag.as_bool()};
}

[[noreturn]] void refuse_place() {
  throw Error(ErrorCode::conflict, "two names of the file lead to one place");
}

// The dict under `key`, which is made when there is none.
Value dict_under(Value dict, const Value& key) {
  if (const Value* found = dict.find_key(key)) {
    if (!found->is(Value::Kind::dict)) refuse_place();
    return *found;
  }
  Value made = Value::dict();
  dict.set_item(key, made);
  return made;
}

}  // namespace

void put_at(const Value& root, const Value::List& keys, const Value& value) {
  Value dict = root;
  for (const Value& key : std::span(keys).first(keys.size() - 1)) dict = dict_under(dict, key);
  if (dict.find_key(keys.back()) != nullptr) refuse_place();
  dict.set_item(keys.back(), value);
}

std::string encode_key(const Key& key) {
  const Value pair = Value::tuple({Value::tuple(key.keys), key.pickled});
  return to_base64(pickle::write(pair, {.protocol = 4, .persistent_id = {}, .reduce = {}}));
}

std::optional<Key> decode_key(std::string_view name) {
  const auto bytes = from_base64(name);
  if (!bytes || bytes->front() != std::byte{0x80}) return std::nullopt;
  try {
    return key_of(pickle::read(*bytes).value);
  } catch (const Error&) {
    return std::nullopt;
  }
}

std::vector<std::byte> encode_value(const Value& value) {
  return pickle::write(value, {.protocol = 4, .persistent_id = {}, .reduce = {}});
}

Value decode_value(ByteView bytes) {
  return pickle::read(bytes).value;
}

}  // namespace tessera::olmo
