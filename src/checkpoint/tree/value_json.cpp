#include "checkpoint/tree/value_json.h"

#include <cmath>

#include "base/checked.h"
#include "format/torch/torch_file.h"
#include "tessera/error.h"
#include "value/copy.h"
#include "value/inner_tensors.h"
#include "value/render.h"

namespace tessera {
namespace {

// In an archive of torch.save this object stands for a tensor beside it: tessera.tensor(name).
constexpr const char* kModule = "tessera";
constexpr const char* kTensor = "tensor";

std::string to_hex(const std::vector<std::byte>& bytes) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  text.reserve(2 * bytes.size());
  for (const std::byte byte : bytes) {
    text += kDigits[std::to_integer<unsigned>(byte) >> 4];
    text += kDigits[std::to_integer<unsigned>(byte) & 15];
  }
  return text;
}

std::vector<std::byte> from_hex(const std::string& text) {
  const auto digit = [](char c) -> unsigned {
    if (c >= '0' && c <= '9') return static_cast<unsigned>(c - '0');
    if (c >= 'a' && c <= 'f') return static_cast<unsigned>(c - 'a') + 10;
    throw Error(ErrorCode::corrupt, "not a hexadecimal digit in a tagged value");
  };
  if (text.size() % 2 != 0) throw Error(ErrorCode::corrupt, "half a byte in a tagged value");
  std::vector<std::byte> bytes;
  bytes.reserve(text.size() / 2);
  for (std::size_t i = 0; i < text.size(); i += 2) {
    bytes.push_back(static_cast<std::byte>(digit(text[i]) << 4 | digit(text[i + 1])));
  }
  return bytes;
}

// Hexadecimal text of more does not fit the longest header that a safetensors file may have.
constexpr std::uint64_t kLongest = 50'000'000;

// Refused before anything is copied.
void require_short(std::uint64_t size) {
  if (size <= kLongest) return;
  throw Error(ErrorCode::limit, "a value of " + std::to_string(size) +
                                    " bytes that are no tensor does not fit the header");
}

std::uint64_t bytes_inside(const Value& value) {
  std::uint64_t bytes = 0;
  const Value around = Value::tuple({value});  // what is found lives as long as it
  for (const InnerTensor& inner : inner_tensors(around)) {
    for (const Piece& piece : inner.tensor->as_tensor().pieces)
      bytes += piece.storage ? piece.storage->size : 0;
  }
  return bytes;
}

Json tag(const char* name, Json content) {
  Json object = Json::object();
  object[name] = std::move(content);
  return object;
}

class Encoder {
 public:
  explicit Encoder(const TensorNames& names) : names_(names) {}

  Json encode(const Value& value) const {
    if (std::optional<Json> scalar = json_scalar(value)) return std::move(*scalar);
    switch (value.kind()) {
      case Value::Kind::list:
        return encode_items(value.items());
      case Value::Kind::tuple:
        return tag("tuple", encode_items(value.items()));
      case Value::Kind::real:
        return encode_special_real(value);
      case Value::Kind::bytes:
        require_short(value.as_bytes().size());
        return tag("bytes", to_hex(value.as_bytes()));
      case Value::Kind::tensor:
        if (const auto name = names_.find(value.identity()); name != names_.end())
          return tag("tensor", name->second);
        break;
      case Value::Kind::dict:
        if (value.dict_kind() == DictKind::dict && value.container_state() == nullptr)
          return encode_dict(value);
        break;
      default:
        break;
    }
    // Whatever JSON has no word for: an archive of torch.save.
    const Value rest = without_tensors(value);
    require_short(bytes_inside(rest));
    return tag("torch", to_hex(torch_file::write(rest, "archive")));
  }

 private:
  // JSON has finite numbers, and one kind of NaN is not another.
  static Json encode_special_real(const Value& value) {
    const double real = value.as_real();
    if (!std::isnan(real)) return tag("float", real > 0 ? "inf" : "-inf");
    if (value == Value(std::nan(""))) return tag("float", "nan");
    return tag("torch", to_hex(torch_file::write(value, "archive")));
  }

  Json encode_items(const Value::List& items) const {
    Json array = Json::array();
    for (const Value& item : items) array.push_back(encode(item));
    return array;
  }

  Json encode_dict(const Value& value) const {
    Json pairs = Json::array();
    for (const auto& [key, item] : value.pairs()) pairs.push_back({encode(key), encode(item)});
    return tag("dict", std::move(pairs));
  }

  [[nodiscard]] Value without_tensors(const Value& value) const {
    if (names_.empty()) return value;
    return copy_tree(value, [this](const Value& node) -> std::optional<Value> {
      if (!node.is(Value::Kind::tensor)) return std::nullopt;
      const auto name = names_.find(node.identity());
      if (name == names_.end()) return std::nullopt;
      return Value::object({.callable = Value::global(kModule, kTensor),
                            .arguments = Value::tuple({Value(name->second)})});
    });
  }

  const TensorNames& names_;
};

[[noreturn]] void malformed(const std::string& name) {
  throw Error(ErrorCode::corrupt, "the content of tag '" + name + "' is malformed");
}

// What Python takes as a key.
bool is_key(const Value& value) {
  switch (value.kind()) {
    case Value::Kind::list:
    case Value::Kind::dict:
    case Value::Kind::set:
    case Value::Kind::bytearray:
    case Value::Kind::tensor:
      return false;
    default:
      return true;
  }
}

// An archive that is damaged, cut short or no archive at all is damage of the entry. One of a kind
// that is refused elsewhere too (`unsafe`, `unsupported`, `limit`) stays so.
Value read_archive(const std::string& hex) {
  try {
    return torch_file::read(memory_source(from_hex(hex), "a tagged value"));
  } catch (const Error& error) {
    if (error.code() != ErrorCode::incomplete && error.code() != ErrorCode::mismatch) throw;
    throw Error(ErrorCode::corrupt, "the archive in tag 'torch' is damaged: " + error.message());
  }
}

class Decoder {
 public:
  explicit Decoder(const TensorsByName& tensors) : tensors_(tensors) {}

  Value decode(const Json& json) const {
    switch (json.type()) {
      case Json::value_t::null:
        return {};
      case Json::value_t::boolean:
        return {json.get<bool>()};
      case Json::value_t::number_integer:
        return {json.get<std::int64_t>()};
      case Json::value_t::number_unsigned:
        return {narrow<std::int64_t>(json.get<std::uint64_t>())};
      case Json::value_t::number_float:
        return {json.get<double>()};
      case Json::value_t::string:
        return {json.get<std::string>()};
      case Json::value_t::array:
        return Value::list(decode_items(json));
      case Json::value_t::object:
        return decode_tagged(json);
      default:
        throw Error(ErrorCode::corrupt, "unknown JSON in a tagged value");
    }
  }

 private:
  Value::List decode_items(const Json& array) const {
    Value::List items;
    for (const Json& item : array) items.push_back(decode(item));
    return items;
  }

  static Value decode_float(const std::string& text) {
    if (text == "nan") return {std::nan("")};
    if (text == "inf") return {HUGE_VAL};
    if (text != "-inf") malformed("float");
    return {-HUGE_VAL};
  }

  Value decode_tagged(const Json& json) const {
    if (json.size() != 1) throw Error(ErrorCode::corrupt, "a tagged value without one tag");
    const std::string name = json.begin().key();
    const Json& content = json.begin().value();
    if (name == "tuple") {
      if (!content.is_array()) malformed(name);
      return Value::tuple(decode_items(content));
    }
    if (name == "bytes") return Value::bytes(from_hex(content.get<std::string>()));
    if (name == "tensor") return tensor(content.get<std::string>());
    if (name == "torch") return decode_archive(content.get<std::string>());
    if (name == "float") return decode_float(content.get<std::string>());
    if (name == "dict") return decode_dict(content);
    throw Error(ErrorCode::corrupt, "unknown tag '" + name + "' in a tagged value");
  }

  Value decode_dict(const Json& content) const {
    if (!content.is_array()) malformed("dict");
    Value dict = Value::dict();
    for (const Json& pair : content) {
      if (!pair.is_array() || pair.size() != 2) malformed("dict");
      Value key = decode(pair[0]);
      const std::size_t before = dict.size();
      if (is_key(key)) dict.set_item(std::move(key), decode(pair[1]));
      if (dict.size() == before) malformed("dict");  // no key, or one that was there
    }
    return dict;
  }

  Value decode_archive(const std::string& hex) const {
    const Value value = read_archive(hex);
    return copy_tree(value, [this](const Value& node) -> std::optional<Value> {
      if (!node.is(Value::Kind::object)) return std::nullopt;
      const Object& object = node.as_object();
      const bool reference =
          object.callable.is(Value::Kind::global) && object.callable.global_module() == kModule &&
          object.callable.global_name() == kTensor && object.arguments.size() == 1 &&
          object.arguments.items()[0].is(Value::Kind::string);
      if (!reference) return std::nullopt;
      return tensor(object.arguments.items()[0].as_string());
    });
  }

  Value tensor(const std::string& name) const {
    const auto found = tensors_.find(name);
    if (found != tensors_.end()) return found->second;
    throw Error(ErrorCode::corrupt, "a value refers to a tensor that is not there").at_key(name);
  }

  const TensorsByName& tensors_;
};

}  // namespace

std::optional<Json> json_scalar(const Value& value) {
  switch (value.kind()) {
    case Value::Kind::none:
      return Json(nullptr);
    case Value::Kind::boolean:
      return Json(value.as_bool());
    case Value::Kind::string:
      return Json(value.as_string());
    case Value::Kind::integer:
      if (value.as_integer().big.empty()) return Json(value.as_int());
      return std::nullopt;
    case Value::Kind::real:
      if (std::isfinite(value.as_real())) return Json(value.as_real());
      return std::nullopt;
    default:
      return std::nullopt;
  }
}

Json encode_value(const Value& value, const TensorNames& names) {
  return Encoder(names).encode(value);
}

Value decode_value(const Json& json, const TensorsByName& tensors) {
  return Decoder(tensors).decode(json);
}

// Wherever the tag stands: what is not read as a value today may be tomorrow.
void for_each_archive(const Json& json,
                      const std::function<void(std::vector<std::byte> bytes)>& take) {
  if (!json.is_structured()) return;
  for (const auto& [name, content] : json.items()) {
    if (json.is_object() && name == "torch" && content.is_string()) {
      take(from_hex(content.get_ref<const std::string&>()));
    } else {
      for_each_archive(content, take);
    }
  }
}

Json encode_path(const Path& path) {
  Json array = Json::array();
  for (const PathPart& part : path) {
    if (const auto* key = std::get_if<std::string>(&part)) {
      array.push_back(*key);
    } else if (const auto* odd = std::get_if<DictKey>(&part)) {
      array.push_back(tag("key", encode_value(odd->key)));
    } else {
      array.push_back(std::get<std::int64_t>(part));
    }
  }
  return array;
}

Path decode_path(const Json& array) {
  if (!array.is_array()) throw Error(ErrorCode::corrupt, "a path in the tree is no list");
  Path path;
  for (const Json& step : array) {
    if (step.is_string()) {
      path.emplace_back(step.get<std::string>());
    } else if (step.is_object()) {
      Value key = decode_value(step.at("key"));
      std::string text = key_text(key);
      path.emplace_back(DictKey{std::move(text), std::move(key)});
    } else if (step.is_number_integer()) {
      path.emplace_back(step.get<std::int64_t>());
    } else {
      throw Error(ErrorCode::corrupt, "a step of a path in the tree is " + step.dump());
    }
  }
  return path;
}

}  // namespace tessera
