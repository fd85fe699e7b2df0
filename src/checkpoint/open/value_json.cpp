#include "checkpoint/open/value_json.h"

#include <cmath>
#include <functional>
#include <unordered_map>

#include <nlohmann/json.hpp>

#include "base/checked.h"
#include "format/torch/torch_file.h"
#include "tessera/error.h"

namespace tessera {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kVersion = 1;  // of the entry's schema
constexpr int kMaxDepth =
    4096;  // of the JSON: containers are at most 1000 deep, each two of its own

std::string to_hex(const std::vector<std::byte>& bytes) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
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
  for (std::size_t i = 0; i < text.size(); i += 2) {
    bytes.push_back(static_cast<std::byte>(digit(text[i]) << 4 | digit(text[i + 1])));
  }
  return bytes;
}

Json tag(const char* name, Json content) {
  Json object = Json::object();
  object[name] = std::move(content);
  return object;
}

Json encode(const Value& value);

Json encode_items(const Value::List& items) {
  Json array = Json::array();
  for (const Value& item : items) array.push_back(encode(item));
  return array;
}

Json encode(const Value& value) {
  switch (value.kind()) {
    case Value::Kind::none:
      return nullptr;
    case Value::Kind::boolean:
      return value.as_bool();
    case Value::Kind::string:
      return value.as_string();
    case Value::Kind::list:
      return encode_items(value.items());
    case Value::Kind::tuple:
      return tag("tuple", encode_items(value.items()));
    case Value::Kind::integer:
      if (value.as_integer().big.empty()) return value.as_int();
      break;
    case Value::Kind::real:
      if (std::isfinite(value.as_real())) return value.as_real();
      return tag("float", std::isnan(value.as_real()) ? "nan"
                          : value.as_real() > 0       ? "inf"
                                                      : "-inf");
    case Value::Kind::bytes:
      return tag("bytes", to_hex(value.as_bytes()));
    case Value::Kind::dict: {
      if (value.dict_kind() != DictKind::dict || value.container_state() != nullptr) break;
      Json pairs = Json::array();
      for (const auto& [key, item] : value.pairs()) pairs.push_back({encode(key), encode(item)});
      return tag("dict", std::move(pairs));
    }
    default:
      break;
  }
  // Whatever JSON has no word for, tensors inside a tuple too: an archive of torch.save.
  return tag("torch", to_hex(torch_file::write(value, "archive")));
}

Value decode(const Json& json);

[[noreturn]] void malformed(const std::string& name) {
  throw Error(ErrorCode::corrupt, "the content of tag '" + name + "' is malformed");
}

Value::List decode_items(const Json& array) {
  Value::List items;
  for (const Json& item : array) items.push_back(decode(item));
  return items;
}

// An archive that is damaged, cut short or no archive at all is damage of the entry. One of a kind
// that is refused elsewhere too (`unsafe`, `unsupported`, `limit`) stays so.
Value decode_archive(const std::string& hex) {
  try {
    return torch_file::read(memory_source(from_hex(hex), kTreeKey));
  } catch (const Error& error) {
    if (error.code() != ErrorCode::incomplete && error.code() != ErrorCode::mismatch) throw;
    throw Error(ErrorCode::corrupt, "the archive in tag 'torch' is damaged: " + error.message());
  }
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

Value decode_dict(const Json& content) {
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

Value decode_tagged(const Json& json) {
  if (json.size() != 1) throw Error(ErrorCode::corrupt, "a tagged value without one tag");
  const std::string name = json.begin().key();
  const Json& content = json.begin().value();
  if (name == "tuple") {
    if (!content.is_array()) malformed(name);
    return Value::tuple(decode_items(content));
  }
  if (name == "bytes") return Value::bytes(from_hex(content.get<std::string>()));
  if (name == "torch") return decode_archive(content.get<std::string>());
  if (name == "float") {
    const auto text = content.get<std::string>();
    if (text == "nan") return Value(std::nan(""));
    if (text != "inf" && text != "-inf") malformed(name);
    return Value(text == "inf" ? HUGE_VAL : -HUGE_VAL);
  }
  if (name == "dict") {
    return decode_dict(content);
  }
  throw Error(ErrorCode::corrupt, "unknown tag '" + name + "' in a tagged value");
}

Value decode(const Json& json) {
  switch (json.type()) {
    case Json::value_t::null:
      return Value();
    case Json::value_t::boolean:
      return Value(json.get<bool>());
    case Json::value_t::number_integer:
      return Value(json.get<std::int64_t>());
    case Json::value_t::number_unsigned:
      return Value(narrow<std::int64_t>(json.get<std::uint64_t>()));
    case Json::value_t::number_float:
      return Value(json.get<double>());
    case Json::value_t::string:
      return Value(json.get<std::string>());
    case Json::value_t::array:
      return Value::list(decode_items(json));
    case Json::value_t::object:
      return decode_tagged(json);
    default:
      throw Error(ErrorCode::corrupt, "unknown JSON in a tagged value");
  }
}

Json encode_path(const Path& path) {
  Json array = Json::array();
  for (const PathPart& part : path) {
    std::visit([&array](const auto& step) { array.push_back(step); }, part);
  }
  return array;
}

Path decode_path(const Json& array) {
  if (!array.is_array()) throw Error(ErrorCode::corrupt, "a path in the tree is no list");
  Path path;
  for (const Json& step : array) {
    if (step.is_string()) {
      path.emplace_back(step.get<std::string>());
    } else if (step.is_number_integer()) {
      path.emplace_back(step.get<std::int64_t>());
    } else {
      throw Error(ErrorCode::corrupt, "a step of a path in the tree is " + step.dump());
    }
  }
  return path;
}

std::vector<Leaf> decode_tree(const Json& tree, std::vector<Leaf>& tensors) {
  if (tree.at("version").get<int>() != kVersion) {
    throw Error(ErrorCode::unsupported, "the tree entry has version " + tree.at("version").dump());
  }
  if (!tree.at("leaves").is_array())
    throw Error(ErrorCode::corrupt, "the tree's leaves are no list");
  std::unordered_map<std::string, Leaf*> by_name;
  for (Leaf& leaf : tensors) by_name.emplace(leaf.name, &leaf);
  std::vector<Leaf> ordered;
  for (const Json& item : tree.at("leaves")) {
    const Path path = decode_path(item.at("path"));
    const std::string name = item.value("name", dotted(path));
    if (item.contains("value")) {
      ordered.push_back({name, path, decode(item.at("value"))});
      continue;
    }
    const auto tensor = by_name.find(name);
    if (tensor == by_name.end()) continue;  // in another file of the set
    ordered.push_back(std::move(*tensor->second));
    ordered.back().path = path;
    by_name.erase(tensor);
  }
  // Tensors that somebody added to the file keep their place after the tree's own.
  for (Leaf& leaf : tensors) {
    if (by_name.contains(leaf.name)) ordered.push_back(std::move(leaf));
  }
  return ordered;
}

// Calls `use` with the entry as JSON, when there is one.
void with_entry(const std::map<std::string, std::string>& metadata,
                const std::function<void(const Json& tree)>& use) {
  const auto entry = metadata.find(kTreeKey);
  if (entry == metadata.end()) return;
  const auto shallow = [](int depth, Json::parse_event_t, Json&) {
    if (depth <= kMaxDepth) return true;
    throw Error(ErrorCode::limit,
                std::string("the metadata entry '") + kTreeKey + "' is nested too deep");
  };
  try {
    use(Json::parse(entry->second, shallow));
  } catch (const Json::exception& error) {
    throw Error(ErrorCode::corrupt,
                std::string("the metadata entry '") + kTreeKey + "' is malformed: " + error.what());
  }
}

// Wherever the tag stands: what is not read as a value today may be tomorrow.
void take_archives(const Json& json,
                   const std::function<void(std::vector<std::byte> bytes)>& take) {
  if (!json.is_structured()) return;
  for (const auto& [name, content] : json.items()) {
    if (json.is_object() && name == "torch" && content.is_string()) {
      take(from_hex(content.get_ref<const std::string&>()));
    } else {
      take_archives(content, take);
    }
  }
}

}  // namespace

std::string encode_tree(const std::vector<Leaf>& leaves, std::uint64_t& values) {
  Json list = Json::array();
  for (const Leaf& leaf : leaves) {
    Json item = Json::object();
    item["path"] = encode_path(leaf.path);
    if (dotted(leaf.path) != leaf.name) item["name"] = leaf.name;
    if (!leaf.value.is(Value::Kind::tensor)) {
      item["value"] = encode(leaf.value);
      ++values;
    }
    list.push_back(std::move(item));
  }
  Json tree = Json::object();
  tree["version"] = kVersion;
  tree["leaves"] = std::move(list);
  try {
    return tree.dump(-1, ' ', true);
  } catch (const Json::exception& error) {
    throw Error(ErrorCode::unsupported,
                std::string("a name or text is not UTF-8: ") + error.what());
  }
}

void add_from_metadata(const std::map<std::string, std::string>& metadata,
                       std::vector<Leaf>& leaves) {
  with_entry(metadata, [&leaves](const Json& tree) { leaves = decode_tree(tree, leaves); });
}

void for_each_archive(const std::map<std::string, std::string>& metadata,
                      const std::function<void(std::vector<std::byte> bytes)>& take) {
  with_entry(metadata, [&take](const Json& tree) { take_archives(tree, take); });
}

}  // namespace tessera
