// Values as tagged JSON, the schema of docs/formats/safetensors.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include <nlohmann/json.hpp>

#include "checkpoint/read/json_writer.h"
#include "tessera/leaf.h"
#include "tessera/value.h"

namespace tessera {

using Json = nlohmann::json;

// The names of tensors that lie beside the JSON, by node.
using TensorNames = std::unordered_map<const void*, std::string>;
// And by name: what they are.
using TensorsByName = std::unordered_map<std::string, Value>;

// A tensor in `names` becomes a reference to it, any other one is copied whole, into memory.
void append_value(JsonWriter& json, const Value& value, const TensorNames& names = {});

// A number of bytes below which append_value does not stay, without tensors and what stands in
// archives: known before the first of them is written.
[[nodiscard]] std::uint64_t fewest_bytes(const Value& value);

// The inverse. Throws `corrupt` for JSON that append_value does not write and for a reference that
// `tensors` lacks.
[[nodiscard]] Value decode_value(const Json& json, const TensorsByName& tensors = {});

// Hands out the archives of torch.save inside of `json`, without reading them.
void for_each_archive(const Json& json,
                      const std::function<void(std::vector<std::byte> bytes)>& take);

// Steps of a path: strings, list indices, and other keys as {"key": value}.
void append_path(JsonWriter& json, std::span<const PathPart> path);
[[nodiscard]] Path decode_path(const Json& array);

}  // namespace tessera
