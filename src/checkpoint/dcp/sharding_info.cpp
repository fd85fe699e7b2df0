#include "checkpoint/dcp/sharding_info.h"

#include <nlohmann/json.hpp>

#include "tessera/error.h"

namespace tessera {
namespace {

using Json = nlohmann::json;

constexpr int kMaxDepth = 3;  // the object, a tensor's object, its offsets

Shape shape_of(const Json& json, const std::string& name) {
  if (!json.is_array()) throw Error(ErrorCode::corrupt, "saved_offsets are no list").at_key(name);
  Shape shape;
  for (const Json& number : json) {
    const bool fits = number.is_number_unsigned() && number.get<std::uint64_t>() <= INT64_MAX;
    if (!fits) throw Error(ErrorCode::corrupt, "a saved offset is " + number.dump()).at_key(name);
    shape.push_back(number.get<std::int64_t>());
  }
  return shape;
}

}  // namespace

std::map<std::string, Shape> sharding_offsets(const std::map<std::string, std::string>& metadata) {
  std::map<std::string, Shape> offsets;
  const auto entry = metadata.find(kShardingKey);
  if (entry == metadata.end()) return offsets;
  const auto shallow = [](int depth, Json::parse_event_t, Json&) {
    if (depth > kMaxDepth)
      throw Error(ErrorCode::corrupt, std::string(kShardingKey) + " is nested too deep");
    return true;
  };
  try {
    const Json json = Json::parse(entry->second, shallow);
    for (const auto& [name, info] : json.items()) {
      offsets[name] = shape_of(info.at("saved_offsets"), name);
    }
  } catch (const Json::exception& error) {
    throw Error(ErrorCode::corrupt, std::string(kShardingKey) + ": " + error.what());
  }
  return offsets;
}

}  // namespace tessera
