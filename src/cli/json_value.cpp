#include "cli/json_value.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <system_error>
#include <utility>

#include <fmt/format.h>

#include "checkpoint/read/cast.h"
#include "tessera/numpy_array.h"
#include "value/children.h"
#include "value/integer.h"
#include "value/known.h"
#include "value/render.h"

namespace tessera::cli {
namespace {

using Json = nlohmann::ordered_json;
using Kind = Value::Kind;

constexpr std::size_t kLongestText = 1 << 20;  // bytes of a value that JSON has no word for

// Of 64 bits, with a sign or without.
std::optional<Json> json_integer(const Integer& integer) {
  if (integer.big.empty()) return Json(integer.small);
  const std::string text = to_decimal(integer);
  std::uint64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return Json(number);
}

// A scalar of numpy as the number that it is; nullopt: another value.
std::optional<Json> json_number(const Value& value) {
  const auto array = numpy_array(value);
  if (!array || !array->is_scalar) return std::nullopt;
  return element_json(array->tensor.dtype, array->tensor.pieces.front().storage->data);
}

// The JSON of a value for which it has a word: None, booleans, strings, integers of 64 bits and
// finite reals. nullopt: any other value.
std::optional<Json> json_scalar(const Value& value) {
  switch (value.kind()) {
    case Kind::none:
      return Json(nullptr);
    case Kind::boolean:
      return Json(value.as_bool());
    case Kind::string:
      return Json(value.as_string());
    case Kind::integer:
      return json_integer(value.as_integer());
    case Kind::real:
      if (std::isfinite(value.as_real())) return Json(value.as_real());
      return std::nullopt;
    case Kind::object:
      return json_number(value);
    default:
      return std::nullopt;
  }
}

// No more than `left` values; nullopt: there are more.
std::optional<Json> bounded(const Value& value, std::size_t& left);

std::optional<Json> array_of(const Value& value, std::size_t& left) {
  Json array = Json::array();
  for (const Value& item : value.items()) {
    auto made = bounded(item, left);
    if (!made) return std::nullopt;
    array.push_back(std::move(*made));
  }
  return array;
}

std::optional<Json> dict_of(const Value& value, std::size_t& left) {
  const auto& pairs = value.pairs();
  const bool named = std::all_of(pairs.begin(), pairs.end(),
                                 [](const auto& pair) { return pair.first.is(Kind::string); });
  Json json = named ? Json::object() : Json::array();
  for (const auto& [key, item] : pairs) {
    auto made = bounded(item, left);
    if (!made) return std::nullopt;
    if (named) {
      // A key is in a dict once: it need not be looked for.
      json.get_ref<Json::object_t&>().emplace_back(key.as_string(), std::move(*made));
      continue;
    }
    auto made_key = bounded(key, left);
    if (!made_key) return std::nullopt;
    json.push_back(Json::array({std::move(*made_key), std::move(*made)}));
  }
  return json;
}

std::optional<Json> bounded(const Value& value, std::size_t& left) {
  if (left == 0) return std::nullopt;
  --left;
  if (std::optional<Json> scalar = json_scalar(value)) return scalar;
  if (is_sequence(value.kind())) return array_of(value, left);
  if (value.is(Kind::dict)) return dict_of(value, left);
  return Json(render(value, kLongestText));
}

// Of a global or an object.
std::string class_of(const Value& value) {
  if (const auto array = numpy_array(value)) return "numpy." + numpy_class(*array);
  if (const auto known = known_value(value)) return std::string(known->type);
  return value.is(Kind::global) ? "type" : value.as_object().name();
}

// As type(value).__name__ says it; an object's is its class.
std::string python_type(const Value& value) {
  switch (value.kind()) {
    case Kind::none:
      return "NoneType";
    case Kind::boolean:
      return "bool";
    case Kind::integer:
      return "int";
    case Kind::real:
      return "float";
    case Kind::complex:
      return "complex";
    case Kind::string:
      return "str";
    case Kind::dict:
      return std::string(type_name(value.dict_kind()));
    case Kind::global:
    case Kind::object:
      return class_of(value);
    default: {  // "a list"
      const std::string_view described = describe(value.kind());
      return std::string(described.substr(described.find(' ') + 1));
    }
  }
}

std::string float_text(DType dtype, const std::byte* at) {
  if (dtype == DType::float64) {
    double value = 0;
    std::memcpy(&value, at, sizeof value);
    return render_real(value);
  }
  float value = 0;
  cast(dtype, at, DType::float32, reinterpret_cast<std::byte*>(&value), 1);
  return fmt::format("{}", value);
}

// The type of the real and of the imaginary part; nullopt: not complex.
std::optional<DType> part_of(DType dtype) {
  switch (dtype) {
    case DType::complex32:
      return DType::float16;
    case DType::complex64:
      return DType::float32;
    case DType::complex128:
      return DType::float64;
    default:
      return std::nullopt;
  }
}

// The real or the imaginary part of a complex number.
std::string part_text(DType part, const std::byte* at) {
  if (part == DType::float64) {
    double value = 0;
    std::memcpy(&value, at, sizeof value);
    return std::isnan(value) ? std::string("nan") : fmt::format("{}", value);
  }
  std::string made = float_text(part, at);
  return made == "-nan" ? std::string("nan") : made;
}

// As Python writes it, without the brackets: 1+2j, -0-infj, nan+0j.
std::string complex_text(DType part, const std::byte* at) {
  const std::string imaginary = part_text(part, at + size_of(part));
  return part_text(part, at) + (imaginary.starts_with('-') ? "" : "+") + imaginary + "j";
}

std::string bytes_text(DType dtype, const std::byte* at) {
  std::string text = "0x";
  for (std::size_t i = size_of(dtype); i-- > 0;)
    text += fmt::format("{:02x}", std::to_integer<unsigned>(at[i]));
  return text;
}

std::int64_t integer_of(DType dtype, const std::byte* at) {
  std::int64_t value = 0;
  cast(dtype, at, DType::int64, reinterpret_cast<std::byte*>(&value), 1);
  return value;
}

std::uint64_t unsigned_of(const std::byte* at) {
  std::uint64_t value = 0;
  std::memcpy(&value, at, sizeof value);
  return value;
}

}  // namespace

nlohmann::ordered_json json_of(const Value& value, std::size_t most) {
  std::size_t left = most;
  auto made = bounded(value, left);
  return made ? std::move(*made) : Json(render(value, most));
}

std::string element_text(DType dtype, const std::byte* at) {
  if (dtype == DType::bool8) return *at == std::byte{0} ? "False" : "True";
  if (dtype == DType::uint64) return std::to_string(unsigned_of(at));
  if (const auto part = part_of(dtype)) return complex_text(*part, at);
  if (!can_cast(dtype, DType::float64)) return bytes_text(dtype, at);
  return info(dtype).floating ? float_text(dtype, at) : std::to_string(integer_of(dtype, at));
}

nlohmann::ordered_json element_json(DType dtype, const std::byte* at) {
  if (dtype == DType::bool8) return *at != std::byte{0};
  if (dtype == DType::uint64) return unsigned_of(at);
  if (part_of(dtype) || !can_cast(dtype, DType::float64)) return element_text(dtype, at);
  if (!info(dtype).floating) return integer_of(dtype, at);
  // The shortest text of a float is shorter than that of the double it is converted to.
  const std::string text = float_text(dtype, at);
  const double value = std::strtod(text.c_str(), nullptr);
  return std::isfinite(value) ? Json(value) : Json(text);
}

void add_value(const Value& value, std::size_t most, nlohmann::ordered_json& row) {
  row["type"] = python_type(value);
  if (const auto array = numpy_array(value); array && !array->is_scalar) {
    row["array"] = {{"dtype", to_string(array->tensor.dtype)}, {"shape", array->tensor.shape}};
  }
  row["value"] = json_of(value, most);
  row["text"] = render(value, most * 16);
}

nlohmann::ordered_json facts_of_error(const Error& error) {
  Json facts = Json::object();
  facts["code"] = to_string(error.code());
  facts["message"] = error.message();
  if (!error.path().empty()) facts["path"] = error.path();
  if (!error.key().empty()) facts["key"] = error.key();
  if (error.offset()) facts["offset"] = *error.offset();
  return facts;
}

nlohmann::ordered_json json_of_findings(const std::vector<Finding>& findings) {
  auto rows = nlohmann::ordered_json::array();
  for (const Finding& finding : findings) {
    nlohmann::ordered_json row{{"code", to_string(finding.code)}, {"text", finding.text}};
    const nlohmann::ordered_json facts = facts_of_error(finding.error);
    for (const auto& [fact, value] : facts.items()) row[fact] = value;
    rows.push_back(std::move(row));
  }
  return rows;
}

nlohmann::ordered_json json_of(const Error& error) {
  return {{"error", facts_of_error(error)}};
}

void print_json(const nlohmann::ordered_json& json, int indent) {
  fmt::print("{}\n", json.dump(indent, ' ', true, Json::error_handler_t::replace));
}

void JsonRows::add(const nlohmann::ordered_json& row) {
  std::string lines = std::exchange(empty_, false) ? "[\n " : ",\n ";
  // A line break within a text is escaped: each that is there begins a line of the document.
  for (const char letter : row.dump(1, ' ', true, Json::error_handler_t::replace)) {
    lines += letter;
    if (letter == '\n') lines += ' ';
  }
  fmt::print("{}", lines);
}

void JsonRows::end() {
  fmt::print("{}", empty_ ? "[]\n" : "\n]\n");
}

}  // namespace tessera::cli
