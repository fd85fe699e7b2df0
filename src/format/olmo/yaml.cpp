#include "format/olmo/yaml.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <istream>
#include <limits>
#include <map>
#include <optional>
#include <streambuf>
#include <string>
#include <utility>

#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/exceptions.h>
#include <yaml-cpp/mark.h>
#include <yaml-cpp/parser.h>

#include "base/numbers.h"
#include "base/text.h"
#include "format/pickle/text.h"
#include "tessera/error.h"
#include "value/integer.h"
#include "value/render.h"

namespace tessera::olmo {
namespace {

constexpr std::size_t kLongestNumber = 8192;  // characters; a longer scalar is text

constexpr std::array<std::pair<std::string_view, bool>, 18> kBooleans = {{{"yes", true},
                                                                          {"Yes", true},
                                                                          {"YES", true},
                                                                          {"no", false},
                                                                          {"No", false},
                                                                          {"NO", false},
                                                                          {"true", true},
                                                                          {"True", true},
                                                                          {"TRUE", true},
                                                                          {"false", false},
                                                                          {"False", false},
                                                                          {"FALSE", false},
                                                                          {"on", true},
                                                                          {"On", true},
                                                                          {"ON", true},
                                                                          {"off", false},
                                                                          {"Off", false},
                                                                          {"OFF", false}}};

// The letter that follows the 0 of a number that is not decimal; without a letter it is octal.
struct Base {
  char letter;
  std::string_view digits;
  int number;
};
constexpr std::array<Base, 2> kBases = {{{'b', "01_", 2}, {'x', "0123456789abcdefABCDEF_", 16}}};

// Takes characters off the front of `rest` while `fits`, and says how many.
template <typename Fits>
std::size_t take(std::string_view& rest, Fits fits) {
  const auto end = std::find_if_not(rest.begin(), rest.end(), fits);
  const auto count = static_cast<std::size_t>(end - rest.begin());
  rest.remove_prefix(count);
  return count;
}

bool take_any(std::string_view& rest, std::string_view characters) {
  if (rest.empty() || characters.find(rest.front()) == std::string_view::npos) return false;
  rest.remove_prefix(1);
  return true;
}

bool digit_or_line(char c) {
  return is_digit(c) || c == '_';
}

// Whether a digit follows the first character, which is `separator`.
bool goes_on(std::string_view rest, char separator) {
  return rest.size() >= 2 && rest[0] == separator && is_digit(rest[1]);
}

// [0-9]+(?:_[0-9]+)*
bool take_grouped(std::string_view& rest) {
  if (take(rest, is_digit) == 0) return false;
  while (goes_on(rest, '_')) {
    rest.remove_prefix(1);
    take(rest, is_digit);
  }
  return true;
}

// (?::[0-5]?[0-9])+ ; false when there is none.
bool take_sixties(std::string_view& rest) {
  bool any = false;
  while (goes_on(rest, ':')) {
    const bool two = rest.size() >= 3 && rest[1] <= '5' && is_digit(rest[2]);
    rest.remove_prefix(two ? 3 : 2);
    any = true;
  }
  return any;
}

std::string without_lines(std::string_view text) {
  std::string plain(text);
  std::erase(plain, '_');
  return plain;
}

Value in_base(std::string_view digits, int base, bool negative) {
  const std::string plain = without_lines(digits);
  if (plain.empty()) throw Error(ErrorCode::corrupt, "a YAML integer without digits");
  std::int64_t value = 0;
  const auto result = std::from_chars(plain.data(), plain.data() + plain.size(), value, base);
  if (result.ec != std::errc() || result.ptr != plain.data() + plain.size()) {
    throw Error(ErrorCode::limit, "a YAML integer of more than 64 bits");
  }
  return {negative ? -value : value};
}

// 1:30:15 -> 5415
Value sixties(std::string_view text, bool negative) {
  std::int64_t value = 0;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(':', begin), text.size());
    const Value part = in_base(text.substr(begin, end - begin), 10, false);
    value = checked_add(checked_mul<std::int64_t>(value, 60), part.as_int());
    begin = end + 1;
  }
  return {negative ? -value : value};
}

std::optional<Value> in_base_if(std::string_view digits, std::string_view allowed, int base,
                                bool negative) {
  if (digits.find_first_not_of(allowed) != std::string_view::npos) return std::nullopt;
  return in_base(digits, base, negative);
}

std::optional<Value> decimal_of(std::string_view number, bool negative) {
  std::string_view rest = number;
  if (number.empty() || !is_digit(number[0])) return std::nullopt;
  take(rest, digit_or_line);
  if (rest.empty()) {
    return Value::integer(integer_from_decimal((negative ? "-" : "") + without_lines(number)));
  }
  if (!take_sixties(rest) || !rest.empty()) return std::nullopt;
  return sixties(number, negative);
}

std::optional<Value> integer_of(std::string_view text) {
  const bool negative = text.front() == '-';
  std::string_view number = text;
  take_any(number, "+-");
  if (number == "0") return Value(std::int64_t{0});
  if (number.size() < 2 || number[0] != '0') return decimal_of(number, negative);
  const std::string_view digits = number.substr(2);
  const auto* base = std::ranges::find(kBases, number[1], &Base::letter);
  if (base != kBases.end() && !digits.empty())
    return in_base_if(digits, base->digits, base->number, negative);
  return in_base_if(number.substr(1), "01234567_", 8, negative);
}

// [eE][-+]?[0-9]+, which must have its sign `with_sign`.
bool is_exponent(std::string_view rest, bool with_sign) {
  if (!take_any(rest, "eE")) return false;
  const bool sign = take_any(rest, "+-");
  return (sign || !with_sign) && take(rest, is_digit) > 0 && rest.empty();
}

// \.[0-9]+(?:_[0-9]+)*_*(?:[eE][-+][0-9]+)?
bool is_fraction(std::string_view rest) {
  if (!take_any(rest, ".") || !take_grouped(rest)) return false;
  take(rest, [](char c) { return c == '_'; });
  return rest.empty() || is_exponent(rest, true);
}

// [-+]?[0-9]+(?:_[0-9]+)*\.[0-9_]*(?:[eE][-+]?[0-9]+)? and the form without a point.
bool is_real_with_integer(std::string_view rest) {
  take_any(rest, "+-");
  if (!take_grouped(rest)) return false;
  // PyYAML's own rule takes lines anywhere, but then wants a point and a signed exponent.
  const bool loose = take(rest, digit_or_line) > 0;
  const bool point = take_any(rest, ".");
  if (point) take(rest, digit_or_line);
  if (rest.empty() || (loose && !point)) return point;
  return is_exponent(rest, loose);
}

// Only what has an integer part has a sign before it.
bool is_real(std::string_view text) {
  return text.starts_with('.') ? is_fraction(text) : is_real_with_integer(text);
}

// 1:30.5 -> 90.5
bool is_real_of_sixties(std::string_view rest) {
  take_any(rest, "+-");
  if (!take_grouped(rest)) return false;
  take(rest, digit_or_line);
  if (!take_sixties(rest) || !take_any(rest, ".")) return false;
  take(rest, digit_or_line);
  return rest.empty();
}

double to_double(std::string_view text) {
  const std::string plain = without_lines(text.starts_with('+') ? text.substr(1) : text);
  double value = 0;
  const auto result = std::from_chars(plain.data(), plain.data() + plain.size(), value);
  if (result.ec == std::errc::result_out_of_range) {
    // What from_chars leaves alone: too large, or too small to tell from 0.
    const std::size_t exponent = plain.find_first_of("eE");
    const bool small = exponent != std::string::npos && plain[exponent + 1] == '-';
    value = small ? 0 : std::numeric_limits<double>::infinity();
    return plain.front() == '-' ? -value : value;
  }
  return value;
}

std::optional<Value> real_of(std::string_view text) {
  std::string_view rest = text;
  const bool negative = text.front() == '-';
  take_any(rest, "+-");
  if (is_one_of(rest, ".inf", ".Inf", ".INF")) {
    const double infinity = std::numeric_limits<double>::infinity();
    return Value(negative ? -infinity : infinity);
  }
  if (is_one_of(text, ".nan", ".NaN", ".NAN")) {
    return Value(std::numeric_limits<double>::quiet_NaN());
  }
  if (is_real(text)) return Value(to_double(text));
  if (!is_real_of_sixties(text)) return std::nullopt;
  const std::size_t last = rest.rfind(':');
  const double value = static_cast<double>(sixties(rest.substr(0, last), false).as_int()) * 60 +
                       to_double(rest.substr(last + 1));
  return Value(negative ? -value : value);
}

bool begins_as_number(std::string_view text) {
  return is_digit(text[0]) || is_one_of(text[0], '+', '-', '.');
}

std::optional<Value> number_of(std::string_view text) {
  if (!begins_as_number(text) || text.size() > kLongestNumber) return std::nullopt;
  // In this order: every integer that has a point or an exponent is a real.
  if (auto real = real_of(text)) return real;
  return integer_of(text);
}

}  // namespace

Value plain_scalar(std::string_view text) {
  if (is_one_of(text, "", "~", "null", "Null", "NULL")) return {};
  const auto* word = std::ranges::find(kBooleans, text, [](const auto& row) { return row.first; });
  if (word != kBooleans.end()) return {word->second};
  return number_of(text).value_or(std::string(text));
}

// yaml-cpp finds the structure, event by event; what the events become is decided here.

namespace {

using Kind = Value::Kind;

constexpr std::size_t kDeepest = 100;
constexpr std::size_t kMultiplied = 10;  // how far aliases may multiply a document
constexpr std::string_view kCore = "tag:yaml.org,2002:";

// The type that a tag of YAML's own asks of a plain scalar.
struct Type {
  std::string_view name;
  Kind kind;
};
constexpr std::array<Type, 4> kTypes{
    {{"int", Kind::integer}, {"float", Kind::real}, {"bool", Kind::boolean}, {"null", Kind::none}}};

[[noreturn]] void refuse(ErrorCode code, const std::string& what, const YAML::Mark& mark) {
  Error error(code, what);
  if (mark.pos >= 0) error.at_offset(static_cast<std::uint64_t>(mark.pos));
  throw error;
}

[[noreturn]] void refuse_tag(const std::string& tag, const YAML::Mark& mark) {
  if (tag.starts_with(std::string(kCore) + "python/") || tag.starts_with("!python/")) {
    refuse(ErrorCode::unsafe, "the YAML tag " + printable(tag, 100) + " names a Python object",
           mark);
  }
  refuse(ErrorCode::unsupported, "the YAML tag " + printable(tag, 100) + " is not known", mark);
}

// Reading memory as a stream, which is what the parser takes.
class MemoryBuffer final : public std::streambuf {
 public:
  explicit MemoryBuffer(ByteView bytes) {
    // A get area is not written to.
    auto* begin = reinterpret_cast<char*>(const_cast<std::byte*>(bytes.data()));
    setg(begin, begin, begin + bytes.size());
  }
};

class Builder final : public YAML::EventHandler {
 public:
  explicit Builder(std::size_t size) : most_nodes_(size * kMultiplied) {}

  [[nodiscard]] const Value& root() const { return root_; }

  void OnDocumentStart(const YAML::Mark& mark) override {}
  void OnDocumentEnd() override {}

  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override { add({}, 1, anchor, mark); }

  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                const std::string& value) override {
    add(scalar(tag, value, mark), 1, anchor, mark);
  }

  void OnAlias(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    const auto found = anchors_.find(anchor);
    if (found == anchors_.end()) {
      refuse(ErrorCode::corrupt, "a YAML alias of nothing, or of what it stands in", mark);
    }
    const Anchored known = found->second;
    add(known.value, known.nodes, YAML::NullAnchor, mark);
  }

  void OnSequenceStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                       YAML::EmitterStyle::value style) override {
    require_tag(tag, "seq", mark);
    push(Value::list(), anchor, mark);
  }
  void OnSequenceEnd() override { pop(); }

  void OnMapStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                  YAML::EmitterStyle::value style) override {
    require_tag(tag, "map", mark);
    push(Value::dict(), anchor, mark);
  }
  void OnMapEnd() override { pop(); }

 private:
  struct Anchored {
    Value value;
    std::size_t nodes = 0;  // in the subtree, aliases counted in full
  };
  struct Frame {
    Value value;
    YAML::anchor_t anchor = YAML::NullAnchor;
    YAML::Mark mark;
    std::size_t nodes = 1;
    std::optional<Value> key;  // of a dict, while its value is awaited
  };

  static void require_tag(const std::string& tag, std::string_view own, const YAML::Mark& mark) {
    if (!is_one_of(tag, "", "?", "!", std::string(kCore) + std::string(own))) refuse_tag(tag, mark);
  }

  static Value scalar(const std::string& tag, const std::string& text, const YAML::Mark& mark) {
    if (tag == "?") return plain_scalar(text);
    if (is_one_of(tag, "", "!", std::string(kCore) + "str")) return text;
    return typed_scalar(tag, text, mark);
  }

  // A scalar of one of YAML's own types.
  static Value typed_scalar(const std::string& tag, const std::string& text,
                            const YAML::Mark& mark) {
    if (!tag.starts_with(kCore)) refuse_tag(tag, mark);
    const std::string_view type = std::string_view(tag).substr(kCore.size());
    const Value value = plain_scalar(text);
    const auto* wanted = std::ranges::find(kTypes, type, &Type::name);
    if (wanted == kTypes.end()) refuse_tag(tag, mark);
    if (wanted->kind == Kind::real && value.is(Kind::integer)) return value.as_real();
    if (!value.is(wanted->kind)) {
      refuse(ErrorCode::corrupt,
             "the YAML value " + printable(text, 60) + " is no " + std::string(type), mark);
    }
    return value;
  }

  void push(Value container, YAML::anchor_t anchor, const YAML::Mark& mark) {
    if (frames_.size() >= kDeepest) {
      refuse(ErrorCode::limit, "YAML nested deeper than " + std::to_string(kDeepest), mark);
    }
    Frame& frame = frames_.emplace_back();
    frame.value = std::move(container);
    frame.anchor = anchor;
    frame.mark = mark;
  }

  void pop() {
    const Frame frame = std::move(frames_.back());
    frames_.pop_back();
    add(frame.value, frame.nodes, frame.anchor, frame.mark);
  }

  void add(const Value& value, std::size_t nodes, YAML::anchor_t anchor, const YAML::Mark& mark) {
    if (anchor != YAML::NullAnchor) anchors_[anchor] = {value, nodes};
    if (frames_.empty()) {
      root_ = value;
      return;
    }
    Frame& frame = frames_.back();
    frame.nodes += nodes;
    if (frame.nodes > most_nodes_) {
      refuse(ErrorCode::limit, "YAML aliases multiply the document more than tenfold", mark);
    }
    add_to(frame, value, mark);
  }

  static void add_to(Frame& frame, const Value& value, const YAML::Mark& mark) {
    if (frame.value.is(Kind::list)) {
      frame.value.items().push_back(value);
    } else if (!frame.key) {
      set_key(frame, value, mark);
    } else {
      frame.value.set_item(*frame.key, value);
      frame.key.reset();
    }
  }

  static void require_key(const Value& key, const YAML::Mark& mark) {
    if (is_one_of(key.kind(), Kind::list, Kind::dict, Kind::none)) {
      refuse(ErrorCode::corrupt, "a YAML key is " + std::string(describe(key.kind())), mark);
    }
    if (key.is(Kind::string) && key.as_string() == "<<") {
      refuse(ErrorCode::unsupported, "a YAML merge key", mark);
    }
  }

  static bool has_key(const Value& dict, const Value& key) {
    if (key.is(Kind::string)) return dict.find(key.as_string()) != nullptr;
    return std::ranges::count(dict.pairs(), key, &Value::Pair::first) != 0;
  }

  static void set_key(Frame& frame, const Value& key, const YAML::Mark& mark) {
    require_key(key, mark);
    if (has_key(frame.value, key))
      refuse(ErrorCode::corrupt, "the YAML key " + render(key, 60) + " is twice", mark);
    frame.key = key;
  }

  const std::size_t most_nodes_;
  Value root_;
  std::vector<Frame> frames_;
  std::map<YAML::anchor_t, Anchored> anchors_;  // those that are complete
};

// Everything but tab and line ends below space; UTF-16 has NULs.
bool is_control(char c) {
  return static_cast<unsigned char>(c) < 0x20 && !is_one_of(c, '\t', '\n', '\r');
}

void require_text(ByteView bytes) {
  if (bytes.size() > kYamlLimit) {
    throw Error(ErrorCode::limit, "YAML of " + std::to_string(bytes.size()) +
                                      " bytes, expected at most " + std::to_string(kYamlLimit));
  }
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  if (text.starts_with("\xef\xbb\xbf")) {
    throw Error(ErrorCode::corrupt, "YAML that begins with a byte order mark").at_offset(0);
  }
  const auto control = std::find_if(text.begin(), text.end(), is_control);
  if (control != text.end()) {
    throw Error(ErrorCode::corrupt, "a control character in YAML")
        .at_offset(static_cast<std::uint64_t>(control - text.begin()));
  }
  pickle::require_utf8(text);
}

// Null: the document is no dict, or has no such key.
const Value* find_at_root(const Value& root, std::string_view key) {
  return root.is(Kind::dict) ? root.find(key) : nullptr;
}

bool is_world_size(const Value& value) {
  return value.is(Kind::integer) && value.as_integer().big.empty() && value.as_int() >= 1 &&
         value.as_int() <= kMostRanks;
}

}  // namespace

Value parse_yaml(ByteView text) {
  require_text(text);
  MemoryBuffer buffer(text);
  std::istream stream(&buffer);
  Builder builder(text.size());
  try {
    YAML::Parser parser(stream);
    if (!parser.HandleNextDocument(builder)) return {};
    Builder second(text.size());
    if (parser.HandleNextDocument(second)) {
      throw Error(ErrorCode::corrupt, "several YAML documents, expected one");
    }
  } catch (const YAML::Exception& error) {
    refuse(ErrorCode::corrupt, "not YAML: " + error.msg, error.mark);
  }
  return builder.root();
}

int world_size_of(ByteView metadata_yaml) {
  const Value root = parse_yaml(metadata_yaml);
  const Value* size = find_at_root(root, "world_size");
  if (size == nullptr) throw Error(ErrorCode::corrupt, "no world_size in the metadata");
  if (!is_world_size(*size)) {
    throw Error(ErrorCode::corrupt, "a world_size of " + render(*size, 60) +
                                        ", expected a number from 1 to " +
                                        std::to_string(kMostRanks));
  }
  return static_cast<int>(size->as_int());
}

std::optional<std::string> sharded_checkpointer_of(ByteView config_yaml) {
  const Value root = parse_yaml(config_yaml);
  const Value* name = find_at_root(root, "sharded_checkpointer");
  if (name == nullptr || !name->is(Kind::string)) return std::nullopt;
  return name->as_string();
}

}  // namespace tessera::olmo
