#include "checkpoint/open/value_json.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "base/numbers.h"
#include "base/text.h"
#include "format/torch/torch_file.h"
#include "tessera/error.h"
#include "value/children.h"
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

unsigned digit_of(char c) {
  if (c >= '0' && c <= '9') return static_cast<unsigned>(c - '0');
  if (c >= 'a' && c <= 'f') return static_cast<unsigned>(c - 'a') + 10;
  throw Error(ErrorCode::corrupt, "not a hexadecimal digit in a tagged value");
}

std::vector<std::byte> from_hex(const std::string& text) {
  if (text.size() % 2 != 0) throw Error(ErrorCode::corrupt, "half a byte in a tagged value");
  std::vector<std::byte> bytes;
  bytes.reserve(text.size() / 2);
  for (std::size_t i = 0; i < text.size(); i += 2) {
    bytes.push_back(static_cast<std::byte>(digit_of(text[i]) << 4 | digit_of(text[i + 1])));
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

// Whether JSON has a word for the value: None, booleans, strings, integers of 64 bits and finite
// reals. Then it is written.
bool append_scalar(JsonWriter& json, const Value& value) {
  switch (value.kind()) {
    case Value::Kind::none:
      json.raw("null");
      return true;
    case Value::Kind::boolean:
      json.raw(value.as_bool() ? "true" : "false");
      return true;
    case Value::Kind::string:
      json.text(value.as_string());
      return true;
    case Value::Kind::integer:
      if (value.as_integer().big.empty()) json.integer(value.as_integer().small);
      return value.as_integer().big.empty();
    case Value::Kind::real:
      if (std::isfinite(value.as_real())) json.real(value.as_real());
      return std::isfinite(value.as_real());
    default:
      return false;
  }
}

// Another dict goes into an archive.
bool is_plain_dict(const Value& value) {
  return value.is(Value::Kind::dict) && value.dict_kind() == DictKind::dict &&
         value.container_state() == nullptr;
}

class Encoder {
 public:
  Encoder(JsonWriter& json, const TensorNames& names) : json_(json), names_(names) {}

  void encode(const Value& value) {
    if (append_scalar(json_, value)) return;
    if (const std::string* name = name_of(value)) {
      return tag("tensor", [&] { json_.text(*name); });
    }
    if (is_plain_dict(value)) return encode_dict(value);
    switch (value.kind()) {
      case Value::Kind::list:
        return encode_items(value.items());
      case Value::Kind::tuple:
        return tag("tuple", [&] { encode_items(value.items()); });
      case Value::Kind::real:
        return encode_special_real(value);
      case Value::Kind::bytes:
        require_short(value.as_bytes().size());
        return tag_hex("bytes", value.as_bytes());
      default:
        return encode_archive(value);
    }
  }

 private:
  // The name of a tensor that lies beside the JSON; null: any other value.
  [[nodiscard]] const std::string* name_of(const Value& value) const {
    const auto name = names_.find(value.identity());
    return name == names_.end() ? nullptr : &name->second;
  }

  // An object with this one member, which `content` writes.
  template <typename Content>
  void tag(std::string_view name, Content content) {
    json_.begin('{');
    json_.key(name);
    content();
    json_.end('}');
  }

  void tag_hex(std::string_view name, const std::vector<std::byte>& bytes) {
    tag(name, [&] { json_.raw('"' + to_hex(bytes) + '"'); });
  }

  // Whatever JSON has no word for: an archive of torch.save.
  void encode_archive(const Value& value) {
    const Value rest = without_tensors(value);
    require_short(bytes_inside(rest));
    tag_hex("torch", torch_file::write(rest, "archive"));
  }

  // JSON has finite numbers, and one kind of NaN is not another.
  void encode_special_real(const Value& value) {
    const double real = value.as_real();
    if (std::isnan(real) && !(value == Value(std::nan(""))))
      return tag_hex("torch", torch_file::write(value, "archive"));
    const char* word = real > 0 ? "\"inf\"" : "\"-inf\"";
    tag("float", [&] { json_.raw(std::isnan(real) ? "\"nan\"" : word); });
  }

  void encode_items(const Value::List& items) {
    json_.begin('[');
    for (const Value& item : items) encode(item);
    json_.end(']');
  }

  void encode_pair(const Value& key, const Value& item) {
    json_.begin('[');
    encode(key);
    encode(item);
    json_.end(']');
  }

  void encode_dict(const Value& value) {
    tag("dict", [&] {
      json_.begin('[');
      for (const auto& [key, item] : value.pairs()) encode_pair(key, item);
      json_.end(']');
    });
  }

  [[nodiscard]] Value without_tensors(const Value& value) const {
    if (names_.empty()) return value;
    return copy_tree(value, [this](const Value& node) -> std::optional<Value> {
      const std::string* name = name_of(node);
      if (name == nullptr) return std::nullopt;
      return Value::object(
          {.callable = Value::global(kModule, kTensor), .arguments = Value::tuple({Value(*name)})});
    });
  }

  JsonWriter& json_;
  const TensorNames& names_;
};

[[noreturn]] void malformed(const std::string& name) {
  throw Error(ErrorCode::corrupt, "the content of tag '" + name + "' is malformed");
}

void require_list(const Json& content, const std::string& name) {
  if (!content.is_array()) malformed(name);
}

// What Python takes as a key.
bool is_key(const Value& value) {
  using Kind = Value::Kind;
  return !is_one_of(value.kind(), Kind::list, Kind::dict, Kind::set, Kind::bytearray, Kind::tensor);
}

// Whether this stands for a tensor beside the archive.
bool is_reference(const Object& object) {
  return object.name() == std::string(kModule) + "." + kTensor && object.arguments.size() == 1 &&
         object.arguments.items()[0].is(Value::Kind::string);
}

// What append_scalar has made, and other numbers that somebody wrote.
Value decode_scalar(const Json& json) {
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
    default:
      throw Error(ErrorCode::corrupt, "unknown JSON in a tagged value");
  }
}

Value decode_bytes(const Json& hex) {
  return Value::bytes(from_hex(hex.get<std::string>()));
}

Value decode_float(const Json& word) {
  const std::string text = word.get<std::string>();
  if (text == "nan") return {std::nan("")};
  if (text == "inf") return {HUGE_VAL};
  if (text != "-inf") malformed("float");
  return {-HUGE_VAL};
}

// An archive that is damaged, cut short or no archive at all is damage of the entry. One of a kind
// that is refused elsewhere too (`unsafe`, `unsupported`, `limit`) stays so.
Value read_archive(const std::string& hex) {
  try {
    return torch_file::read(memory_source(from_hex(hex), "a tagged value"));
  } catch (const Error& error) {
    if (!is_one_of(error.code(), ErrorCode::incomplete, ErrorCode::mismatch)) throw;
    throw Error(ErrorCode::corrupt, "the archive in tag 'torch' is damaged: " + error.message());
  }
}

class Decoder {
 public:
  explicit Decoder(const TensorsByName& tensors) : tensors_(tensors) {}

  Value decode(const Json& json) const {
    if (json.is_array()) return Value::list(decode_items(json));
    return json.is_object() ? decode_tagged(json) : decode_scalar(json);
  }

 private:
  Value::List decode_items(const Json& array) const {
    Value::List items;
    for (const Json& item : array) items.push_back(decode(item));
    return items;
  }

  struct Tag {
    std::string_view name;
    Value (*decode)(const Decoder& decoder, const Json& content);
  };

  Value decode_tagged(const Json& json) const {
    static constexpr std::array<Tag, 6> kTags{{
        {"bytes", [](const Decoder&, const Json& content) { return decode_bytes(content); }},
        {"dict",
         [](const Decoder& self, const Json& content) { return self.decode_dict(content); }},
        {"float", [](const Decoder&, const Json& content) { return decode_float(content); }},
        {"tensor", [](const Decoder& self, const Json& content) { return self.tensor(content); }},
        {"torch",
         [](const Decoder& self, const Json& content) { return self.decode_archive(content); }},
        {"tuple",
         [](const Decoder& self, const Json& content) { return self.decode_tuple(content); }},
    }};
    if (json.size() != 1) throw Error(ErrorCode::corrupt, "a tagged value without one tag");
    const std::string name = json.begin().key();
    const auto* const known = std::ranges::find(kTags, name, &Tag::name);
    if (known == kTags.end())
      throw Error(ErrorCode::corrupt, "unknown tag '" + name + "' in a tagged value");
    return known->decode(*this, json.begin().value());
  }

  Value decode_tuple(const Json& content) const {
    require_list(content, "tuple");
    return Value::tuple(decode_items(content));
  }

  Value decode_dict(const Json& content) const {
    require_list(content, "dict");
    Value dict = Value::dict();
    for (const Json& pair : content) add_pair(pair, dict);
    return dict;
  }

  void add_pair(const Json& pair, Value& dict) const {
    if (!pair.is_array() || pair.size() != 2) malformed("dict");
    Value key = decode(pair[0]);
    const std::size_t before = dict.size();
    if (is_key(key)) dict.set_item(std::move(key), decode(pair[1]));
    if (dict.size() == before) malformed("dict");  // no key, or one that was there
  }

  Value decode_archive(const Json& hex) const {
    const Value value = read_archive(hex.get<std::string>());
    return copy_tree(value, [this](const Value& node) -> std::optional<Value> {
      if (!node.is(Value::Kind::object) || !is_reference(node.as_object())) return std::nullopt;
      return tensor_named(node.as_object().arguments.items()[0].as_string());
    });
  }

  Value tensor(const Json& name) const { return tensor_named(name.get<std::string>()); }

  Value tensor_named(const std::string& name) const {
    const auto found = tensors_.find(name);
    if (found != tensors_.end()) return found->second;
    throw Error(ErrorCode::corrupt, "a value refers to a tensor that is not there").at_key(name);
  }

  const TensorsByName& tensors_;
};

void append_step(JsonWriter& json, const PathPart& part) {
  if (const auto* key = std::get_if<std::string>(&part)) return json.text(*key);
  const auto* odd = std::get_if<DictKey>(&part);
  if (odd == nullptr) return json.integer(std::get<std::int64_t>(part));
  json.begin('{');
  json.key("key");
  append_value(json, odd->key);
  json.end('}');
}

PathPart decode_step(const Json& step) {
  if (step.is_string()) return step.get<std::string>();
  if (step.is_number_integer()) return step.get<std::int64_t>();
  if (!step.is_object())
    throw Error(ErrorCode::corrupt, "a step of a path in the tree is " + step.dump());
  Value key = decode_value(step.at("key"));
  std::string text = key_text(key);
  return DictKey{std::move(text), std::move(key)};
}

}  // namespace

std::uint64_t fewest_bytes(const Value& value) {
  using Kind = Value::Kind;
  std::uint64_t bytes = 1;
  switch (value.kind()) {
    case Kind::string:
      return value.as_string().size();
    case Kind::bytes:
      return 2 * value.as_bytes().size();
    case Kind::integer:
      return std::max<std::uint64_t>(1, 2 * value.as_integer().big.size());
    case Kind::list:
    case Kind::tuple:
      for (const Value& item : value.items()) bytes += fewest_bytes(item);
      return bytes;
    case Kind::dict:
      if (!is_plain_dict(value)) return bytes;
      for (const auto& [key, item] : value.pairs()) bytes += fewest_bytes(key) + fewest_bytes(item);
      return bytes;
    default:
      return bytes;
  }
}

void append_value(JsonWriter& json, const Value& value, const TensorNames& names) {
  Encoder(json, names).encode(value);
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

void append_path(JsonWriter& json, std::span<const PathPart> path) {
  json.begin('[');
  for (const PathPart& part : path) append_step(json, part);
  json.end(']');
}

Path decode_path(const Json& array) {
  if (!array.is_array()) throw Error(ErrorCode::corrupt, "a path in the tree is no list");
  Path path;
  for (const Json& step : array) path.push_back(decode_step(step));
  return path;
}

}  // namespace tessera
