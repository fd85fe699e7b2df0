#include "format/exported/config.h"

#include <array>
#include <charconv>
#include <set>
#include <string_view>
#include <utility>

#include "base/text.h"
#include "format/safetensors/json.h"
#include "tessera/error.h"
#include "tessera/value.h"
#include "value/render.h"

namespace tessera::exported {
namespace {

using Kind = Value::Kind;

constexpr std::size_t kMostLevels = 64;
constexpr std::size_t kMostValues = 100'000;  // in one entry; an honest one has some twenty

// torch/_export/serde/schema.py: ScalarType.
constexpr std::array<std::pair<std::int64_t, DType>, 21> kTypes = {{
    {1, DType::uint8},
    {2, DType::int8},
    {3, DType::int16},
    {4, DType::int32},
    {5, DType::int64},
    {6, DType::float16},
    {7, DType::float32},
    {8, DType::float64},
    {9, DType::complex32},
    {10, DType::complex64},
    {11, DType::complex128},
    {12, DType::bool8},
    {13, DType::bfloat16},
    {28, DType::uint16},
    {29, DType::float8_e4m3fn},
    {30, DType::float8_e5m2},
    {31, DType::float8_e4m3fnuz},
    {32, DType::float8_e5m2fnuz},
    {33, DType::float8_e8m0fnu},
    {34, DType::uint32},
    {35, DType::uint64},
}};
constexpr std::int64_t kStrided = 7;  // Layout.Strided

[[noreturn]] void corrupt(const std::string& what) {
  throw Error(ErrorCode::corrupt, what);
}

// What an entry says, once its JSON is a tree.

const Value& member(const Value& dict, std::string_view name, Kind kind) {
  const Value* found = dict.find(name);
  if (found == nullptr) corrupt("there is no '" + std::string(name) + "'");
  if (!found->is(kind)) corrupt("'" + std::string(name) + "' is of another type");
  return *found;
}

// {"as_int": 3}
std::int64_t number_in(const Value& size) {
  if (!size.is(Kind::dict) || size.size() != 1) corrupt("a size, stride or offset of no form");
  const auto& [form, number] = size.pairs()[0];
  if (form.as_string() == "as_expr")
    throw Error(ErrorCode::unsupported, "a size, stride or offset that is a symbol");
  if (form.as_string() != "as_int" || !number.is(Kind::integer))
    corrupt("a size, stride or offset that is no integer");
  return number.as_int();
}

Shape numbers_in(const Value& meta, std::string_view name) {
  Shape numbers;
  for (const Value& size : member(meta, name, Kind::list).items())
    numbers.push_back(number_in(size));
  return numbers;
}

DType dtype_in(const Value& meta) {
  const std::int64_t number = member(meta, "dtype", Kind::integer).as_int();
  for (const auto& [known, dtype] : kTypes)
    if (known == number) return dtype;
  throw Error(ErrorCode::unsupported, "dtype " + std::to_string(number) + " of torch.export");
}

TensorMeta meta_in(const Value& meta) {
  const std::int64_t layout = member(meta, "layout", Kind::integer).as_int();
  if (layout != kStrided)
    throw Error(ErrorCode::unsupported, "layout " + std::to_string(layout) + " of torch.export");
  return {dtype_in(meta), numbers_in(meta, "sizes"), numbers_in(meta, "strides"),
          number_in(member(meta, "storage_offset", Kind::dict))};
}

Entry entry_of(std::string name, const Value& value) {
  if (!value.is(Kind::dict)) corrupt("the entry is no object");
  Entry entry;
  entry.record = member(value, "path_name", Kind::string).as_string();
  if (is_one_of(entry.record, "", ".", "..") ||
      entry.record.find_first_of(std::string_view("/\\\0", 3)) != std::string::npos) {
    throw Error(ErrorCode::unsafe, "the record's name '" + entry.record + "' is no plain name");
  }
  entry.is_pickled = member(value, "use_pickle", Kind::boolean).as_bool();
  if (entry.is_pickled) {
    entry.name = std::move(name);
    return entry;
  }
  entry.meta = meta_in(member(value, "tensor_meta", Kind::dict));
  entry.name = std::move(name);
  return entry;
}

// Receives {"config": {NAME: entry, ...}}. One entry at a time is a tree.
class ConfigHandler : public safetensors::NumbersAsText {
 public:
  bool Null() { return scalar(Value()); }
  bool Bool(bool value) { return scalar(Value(value)); }
  // What is no integer of 64 bits is nothing that a table has: any other number stands for it.
  bool RawNumber(const char* text, rapidjson::SizeType size, bool) {
    std::int64_t number = 0;
    const auto [end, problem] = std::from_chars(text, text + size, number);
    return scalar(problem == std::errc() && end == text + size ? Value(number) : Value(0.5));
  }
  bool String(const char* text, rapidjson::SizeType size, bool) {
    return scalar(Value(std::string(text, size)));
  }
  bool StartObject() { return enter(true); }
  bool Key(const char* text, rapidjson::SizeType size, bool) {
    Open& at = open_.back();
    at.key.assign(text, size);
    if (at.keys.insert(at.key).second) return true;
    return fail(ErrorCode::corrupt, "the name '" + printable(at.key, 200) + "' is there twice");
  }
  bool EndObject(rapidjson::SizeType) { return leave(); }
  bool StartArray() { return enter(false); }
  bool EndArray(rapidjson::SizeType) { return leave(); }

  [[nodiscard]] bool has_config() const { return has_config_; }
  // The entry that the parser is in, or was in last.
  [[nodiscard]] const std::string& entry() const { return entry_; }
  std::vector<Entry> take() { return std::move(entries_); }

  ErrorCode code = ErrorCode::corrupt;
  std::string error;  // empty: the JSON itself is at fault

 private:
  struct Open {
    bool is_object = false;
    std::string key;             // of the value that comes next
    std::set<std::string> keys;  // of an object
    std::vector<Value::Pair> pairs;
    Value::List items;
  };

  // At the table; at one of its entries.
  [[nodiscard]] bool is_table() const { return open_.size() == 1 && open_[0].key == "config"; }
  [[nodiscard]] bool is_entry() const { return open_.size() == 2 && open_[0].key == "config"; }

  bool scalar(Value value) {
    if (open_.empty() || is_table())
      return fail(ErrorCode::corrupt, "something else than an object where the table is due");
    return put(std::move(value));
  }

  bool put(Value value) {
    Open& at = open_.back();
    if (is_entry()) return take_entry(at.key, value);
    if (open_.size() == 1) {  // the table, whose entries are taken, or what nobody knows
      values_ = 0;
      return true;
    }
    if (++values_ > kMostValues)
      return fail(ErrorCode::limit,
                  "an entry of more than " + std::to_string(kMostValues) + " values");
    if (at.is_object) {
      at.pairs.emplace_back(at.key, std::move(value));
    } else {
      at.items.push_back(std::move(value));
    }
    return true;
  }

  bool take_entry(const std::string& name, const Value& value) {
    values_ = 0;
    entry_ = name;
    try {
      entries_.push_back(entry_of(name, value));
      return true;
    } catch (const Error& failure) {
      return fail(failure.code(), failure.message());
    }
  }

  bool enter(bool is_object) {
    if (open_.size() == kMostLevels)
      return fail(ErrorCode::limit, "JSON nested deeper than " + std::to_string(kMostLevels));
    if ((open_.empty() || is_table()) && !is_object)
      return fail(ErrorCode::corrupt, "a list where the table is due");
    if (is_table()) has_config_ = true;
    if (is_entry()) entry_ = open_.back().key;
    open_.emplace_back().is_object = is_object;
    return true;
  }

  bool leave() {
    Open done = std::move(open_.back());
    open_.pop_back();
    if (open_.empty()) return true;
    return put(done.is_object ? Value::dict(std::move(done.pairs))
                              : Value::list(std::move(done.items)));
  }

  bool fail(ErrorCode with, std::string what) {
    code = with;
    error = std::move(what);
    return false;
  }

  std::vector<Open> open_;  // the objects and lists that the parser is in
  std::vector<Entry> entries_;
  std::string entry_;
  std::size_t values_ = 0;  // of the entry
  bool has_config_ = false;
};

}  // namespace

std::vector<Entry> read_config(ByteView text) {
  ConfigHandler handler;
  const auto fail = [&](ErrorCode code, const std::string& what, std::size_t at) {
    Error error(code, "table of torch.export: " + what);
    if (!handler.entry().empty()) error.at_key(handler.entry());
    throw error.at_offset(at);
  };
  const safetensors::JsonEnd end = safetensors::parse_json(text, handler);
  if (!end.problem.empty()) fail(handler.code, end.problem, end.at);
  if (end.at < text.size()) fail(ErrorCode::corrupt, "text after the JSON", end.at);
  if (!handler.has_config()) fail(ErrorCode::corrupt, "there is no 'config'", text.size());
  return handler.take();
}

}  // namespace tessera::exported
