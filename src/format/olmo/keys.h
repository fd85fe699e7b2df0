// The names of tensors in OLMo's safetensors files (checkpoint-rows F-06, docs/formats/olmo.md).
//
// A state dict of nested dicts becomes flat: the name of a tensor is the URL-safe base64 of the
// pickle of (tuple of keys, flag). With the flag the tensor is not one of the state dict: its bytes
// are the pickle of a value.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/io.h"
#include "tessera/value.h"

namespace tessera::olmo {

struct Key {
  Value::List keys;  // strings and integers, outermost first; at least one
  bool pickled = false;
};

// As OLMo writes it: pickle protocol 4, base64 with padding.
[[nodiscard]] std::string encode_key(const Key& key);
// The key that `name` says, or none when it is not such a name. Never throws.
[[nodiscard]] std::optional<Key> decode_key(std::string_view name);

// Puts `value` where `keys` lead from the dict `root`, through dicts that are made on the way.
// Throws `conflict` for a place that is taken.
void put_at(const Value& root, const Value::List& keys, const Value& value);

// A value as the bytes of a `pickled` tensor, and back. Reading throws as pickle::read does;
// writing throws `unsupported` for a tree that holds a tensor.
[[nodiscard]] std::vector<std::byte> encode_value(const Value& value);
[[nodiscard]] Value decode_value(ByteView bytes);

}  // namespace tessera::olmo
