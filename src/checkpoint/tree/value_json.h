// Values as tagged JSON, the schema of docs/formats/safetensors.md.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include <nlohmann/json.hpp>

#include "tessera/leaf.h"
#include "tessera/value.h"

namespace tessera {

using Json = nlohmann::ordered_json;

// Tensors that lie beside the JSON. By node: their names.
using TensorNames = std::unordered_map<const void*, std::string>;
// And by name: what they are.
using TensorsByName = std::unordered_map<std::string, Value>;

// What JSON has a word for: None, booleans, strings, integers of 64 bits and finite reals. nullopt:
// any other value.
[[nodiscard]] std::optional<Json> json_scalar(const Value& value);

// A tensor in `names` becomes a reference to it, any other one is copied whole, into memory.
[[nodiscard]] Json encode_value(const Value& value, const TensorNames& names = {});

// The inverse. Throws `corrupt` for JSON that encode_value does not write and for a reference that
// `tensors` lacks.
[[nodiscard]] Value decode_value(const Json& json, const TensorsByName& tensors = {});

// Hands out the archives of torch.save inside of `json`, without reading them.
void for_each_archive(const Json& json,
                      const std::function<void(std::vector<std::byte> bytes)>& take);

// Steps of a path: strings, list indices, and other keys as {"key": value}.
[[nodiscard]] Json encode_path(const Path& path);
[[nodiscard]] Path decode_path(const Json& array);

}  // namespace tessera
