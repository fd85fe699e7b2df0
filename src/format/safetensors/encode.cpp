#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "base/numbers.h"
#include "format/safetensors/json.h"
#include "format/safetensors/safetensors.h"
#include "tessera/error.h"

namespace tessera::safetensors {
namespace {

// The reference library sorts by its own enumeration of dtypes, last first.
constexpr std::array kOrder = {
    DType::uint64,
    DType::int64,
    DType::float64,
    DType::complex64,
    DType::float32,
    DType::uint32,
    DType::int32,
    DType::bfloat16,
    DType::float16,
    DType::uint16,
    DType::int16,
    DType::float8_e5m2fnuz,
    DType::float8_e4m3fnuz,
    DType::float8_e8m0fnu,
    DType::float8_e4m3fn,
    DType::float8_e5m2,
    DType::int8,
    DType::uint8,
    DType::float4_e2m1fn_x2,
    DType::bool8,
};

auto rank_of(DType dtype) {
  return std::find(kOrder.begin(), kOrder.end(), dtype);
}

void check_type(const Entry& entry) {
  if (rank_of(entry.dtype) == kOrder.end()) {
    throw Error(ErrorCode::unsupported,
                "safetensors has no dtype for " + std::string(to_string(entry.dtype)))
        .at_key(entry.name);
  }
  if (entry.dtype == DType::float4_e2m1fn_x2 && entry.shape.empty()) {
    throw Error(ErrorCode::unsupported, "safetensors has no F4 scalar").at_key(entry.name);
  }
}

void append_entry(std::string& out, const Entry& entry) {
  append_json(out, entry.name, JsonText::utf8);
  out += ":{\"dtype\":\"";
  out += info(entry.dtype).safetensors;
  out += "\",\"shape\":[";
  for (std::size_t d = 0; d < entry.shape.size(); ++d) {
    const bool pairs = entry.dtype == DType::float4_e2m1fn_x2 && d + 1 == entry.shape.size();
    if (d != 0) out += ',';
    out += std::to_string(pairs ? checked_mul<std::int64_t>(entry.shape[d], 2) : entry.shape[d]);
  }
  out +=
      "],\"data_offsets\":[" + std::to_string(entry.begin) + ',' + std::to_string(entry.end) + "]}";
}

void check_names(const std::vector<Entry>& entries) {
  std::vector<std::string_view> names;
  names.reserve(entries.size());
  for (const Entry& entry : entries) names.push_back(entry.name);
  std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  if (twice != names.end()) {
    throw Error(ErrorCode::invalid_argument, "two safetensors of one name")
        .at_key(std::string(*twice));
  }
  if (std::binary_search(names.begin(), names.end(), "__metadata__")) {
    throw Error(ErrorCode::invalid_argument, "a name that safetensors reserves")
        .at_key("__metadata__");
  }
}

void append_metadata(std::string& json, const std::map<std::string, std::string>& metadata) {
  for (const auto& [key, value] : metadata) {
    if (json.back() != '{') json += ',';
    append_json(json, key, JsonText::utf8);
    json += ':';
    append_json(json, value, JsonText::utf8);
  }
}

// Sorts the tensors and gives each its place, one after another.
void lay_out(std::vector<Entry>& entries) {
  std::ranges::sort(entries, {}, [](const Entry& entry) {
    return std::pair(rank_of(entry.dtype), std::string_view(entry.name));
  });
  std::uint64_t offset = 0;
  for (Entry& entry : entries) {
    entry.begin = offset;
    const auto count = narrow<std::uint64_t>(numel(entry.shape));
    offset = checked_add(offset, checked_mul<std::uint64_t>(count, size_of(entry.dtype)));
    entry.end = offset;
  }
}

// The header's text, filled up to a multiple of 8 bytes.
std::string json_of(const Header& header) {
  std::string json = "{";
  if (!header.metadata.empty()) {
    json += "\"__metadata__\":{";
    append_metadata(json, header.metadata);
    json += '}';
  }
  for (const Entry& entry : header.entries) {
    if (json.back() != '{') json += ',';
    append_entry(json, entry);
  }
  json += '}';
  json.append((8 - json.size() % 8) % 8, ' ');
  return json;
}

}  // namespace

std::vector<std::byte> encode_header(Header& header) {
  check_names(header.entries);
  for (const Entry& entry : header.entries) check_type(entry);
  lay_out(header.entries);
  const std::string json = json_of(header);
  if (json.size() > kHeaderLimit) {
    throw Error(ErrorCode::limit, "safetensors header of " + std::to_string(json.size()) +
                                      " bytes, readers take " + std::to_string(kHeaderLimit));
  }
  std::vector<std::byte> bytes;
  bytes.reserve(8 + json.size());
  append_le(bytes, static_cast<std::uint64_t>(json.size()));
  const auto* text = reinterpret_cast<const std::byte*>(json.data());
  bytes.insert(bytes.end(), text, text + json.size());
  header.data_offset = bytes.size();
  return bytes;
}

}  // namespace tessera::safetensors
