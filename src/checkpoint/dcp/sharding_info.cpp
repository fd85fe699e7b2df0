#include "checkpoint/dcp/sharding_info.h"

#include <nlohmann/json.hpp>

#include "tessera/error.h"

namespace tessera {
namespace {

using Json = nlohmann::json;

constexpr int kMaxDepth = 3;  // the object, a tensor's object, its offsets

std::int64_t offset_of(const Json& number, const std::string& name) {
  const bool fits = number.is_number_unsigned() && number.get<std::uint64_t>() <= INT64_MAX;
  if (!fits) throw Error(ErrorCode::corrupt, "a saved offset is " + number.dump()).at_key(name);
  return number.get<std::int64_t>();
}

Shape offsets_of(const Json& json, const std::string& name) {
  if (!json.is_array()) throw Error(ErrorCode::corrupt, "saved_offsets are no list").at_key(name);
  Shape offsets;
  for (const Json& number : json) offsets.push_back(offset_of(number, name));
  return offsets;
}

Json parsed(const std::string& text) {
  return Json::parse(text, [](int depth, Json::parse_event_t, Json&) {
    if (depth <= kMaxDepth) return true;
    throw Error(ErrorCode::corrupt, std::string(kShardingKey) + " is nested too deep");
  });
}

}  // namespace

std::map<std::string, Shape> sharding_offsets(const std::map<std::string, std::string>& metadata) {
  std::map<std::string, Shape> offsets;
  const auto entry = metadata.find(kShardingKey);
  if (entry == metadata.end()) return offsets;
  try {
    const Json json = parsed(entry->second);
    for (const auto& [name, info] : json.items()) {
      offsets[name] = offsets_of(info.at("saved_offsets"), name);
    }
  } catch (const Json::exception& error) {
    throw Error(ErrorCode::corrupt, std::string(kShardingKey) + ": " + error.what());
  }
  return offsets;
}

}  // namespace tessera
