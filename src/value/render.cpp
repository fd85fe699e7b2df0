#include "value/render.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdint>

#include "base/text.h"
#include "tessera/numpy_array.h"
#include "value/children.h"
#include "value/integer.h"
#include "value/known.h"

namespace tessera {
namespace {

using Kind = Value::Kind;

constexpr std::string_view kHex = "0123456789abcdef";

struct CodeRange {
  std::uint32_t first;
  std::uint32_t last;
};

// Code points that move the cursor, change the direction of writing or end a line.
constexpr std::array<CodeRange, 6> kObeyed{{{0, 0x1f},
                                            {0x7f, 0x9f},
                                            {0x061c, 0x061c},
                                            {0x200e, 0x200f},
                                            {0x2028, 0x202e},
                                            {0x2066, 0x2069}}};
constexpr std::uint32_t kByteOrderMark = 0xfeff;

bool obeyed(std::uint32_t code) {
  return code == kByteOrderMark || std::ranges::any_of(kObeyed, [code](const CodeRange& range) {
           return code >= range.first && code <= range.last;
         });
}

// The last `digits` hexadecimal digits.
void append_hex(std::string& out, std::uint32_t code, unsigned digits) {
  while (digits-- > 0) out += kHex[(code >> (4 * digits)) & 15U];
}

// Codes below `short_end` have two digits.
void append_escape(std::string& out, std::uint32_t code, std::uint32_t short_end = 0x100) {
  if (code == '\n') {
    out += "\\n";
  } else if (code == '\t') {
    out += "\\t";
  } else if (code == '\r') {
    out += "\\r";
  } else if (code < short_end) {
    out += "\\x";
    append_hex(out, code, 2);
  } else {
    out += "\\u";
    append_hex(out, code, 4);
  }
}

// The quote of a name: only backslashes get a backslash, and two digits are a byte that is no
// UTF-8.
constexpr char kOfNames = '\\';

// `quote` (0: none) and backslashes get a backslash.
bool needs_backslash(char first, char quote) {
  return quote != 0 && (first == quote || first == '\\');
}

// `text` is one character with this code.
void append_rune(std::string& out, std::string_view text, std::uint32_t code, char quote) {
  if (obeyed(code)) return append_escape(out, code, quote == kOfNames ? 0x80 : 0x100);
  if (needs_backslash(text.front(), quote)) out += '\\';
  out += text;
}

// Appends `text` printable, up to `cap` bytes of `out`; `quote` (0: none) and backslashes are
// escaped too. Returns whether all of it went in.
bool append_printable(std::string& out, std::string_view text, std::size_t cap, char quote) {
  while (!text.empty()) {
    if (out.size() >= cap) return false;
    const Rune rune = first_rune(text);
    if (rune.length == 0 || is_surrogate(rune.code)) {
      append_escape(out, static_cast<unsigned char>(text.front()));
      text.remove_prefix(1);
      continue;
    }
    append_rune(out, text.substr(0, rune.length), rune.code, quote);
    text.remove_prefix(rune.length);
  }
  return true;
}

// As Python does: without a point where the number is whole.
std::string part_of_complex(double number) {
  std::string text = render_real(number);
  if (text.ends_with(".0")) text.resize(text.size() - 2);
  return text;
}

class Renderer {
 public:
  explicit Renderer(std::size_t cap) : cap_(cap) {}

  std::string run(const Value& value) && {
    add(value, 0);
    if (full()) cut();
    return std::move(out_);
  }

 private:
  static constexpr int kMaxDepth = 64;  // deeper is not readable on one line

  [[nodiscard]] bool full() const { return out_.size() > cap_; }

  // Not in the middle of a UTF-8 sequence.
  void cut() {
    std::size_t end = std::min(cap_, out_.size());
    while (end > 0 && end < out_.size() && (out_[end] & 0xc0) == 0x80) --end;
    out_.resize(end);
    out_ += "...";
  }

  void add(const Value& value, int depth) {
    if (full()) return;
    if (depth > kMaxDepth) {
      out_ += "...";
      return;
    }
    if (is_one_of(value.kind(), Kind::global, Kind::object) && add_known(value, depth)) return;
    if (is_container(value.kind())) {
      add_container(value, depth);
    } else {
      add_leaf(value);
    }
  }

  void add_leaf(const Value& value) {
    switch (value.kind()) {
      case Kind::boolean:
        out_ += value.as_bool() ? "True" : "False";
        break;
      case Kind::integer:
        out_ += to_decimal(value.as_integer());
        break;
      case Kind::real:
        out_ += render_real(value.as_real());
        break;
      case Kind::complex:
        add_complex(value.as_complex());
        break;
      case Kind::string:
        out_ += '\'';
        append_printable(out_, value.as_string(), cap_ + 1, '\'');
        out_ += '\'';
        break;
      case Kind::bytes:
        add_bytes(value.as_bytes());
        break;
      case Kind::bytearray:
        out_ += "bytearray(";
        add_bytes(value.as_bytes());
        out_ += ')';
        break;
      case Kind::tensor:
        add_tensor(value.as_tensor());
        break;
      case Kind::global:
        append_printable(out_, value.global_module(), cap_ + 1, 0);
        out_ += '.';
        append_printable(out_, value.global_name(), cap_ + 1, 0);
        break;
      default:
        out_ += "None";
        break;
    }
  }

  void add_container(const Value& value, int depth) {
    switch (value.kind()) {
      case Kind::list:
        add_items("[", value.items(), "]", depth);
        break;
      case Kind::tuple:
        add_items("(", value.items(), value.size() == 1 ? ",)" : ")", depth);
        break;
      case Kind::set:
        add_items("{", value.items(), "}", depth);
        break;
      case Kind::frozenset:
        add_items("frozenset({", value.items(), "})", depth);
        break;
      case Kind::dict:
        add_pairs("{", value.pairs(), "}", depth);
        break;
      default:
        add_object(value.as_object(), depth);
        break;
    }
  }

  // As Python does: 1j without a real part that is +0.
  void add_complex(std::complex<double> value) {
    const std::string imaginary = part_of_complex(value.imag()) + "j";
    if (value.real() == 0 && !std::signbit(value.real())) {
      out_ += imaginary;
      return;
    }
    out_ += '(' + part_of_complex(value.real()) + (imaginary.starts_with('-') ? "" : "+") +
            imaginary + ')';
  }

  void add_bytes(const std::vector<std::byte>& bytes) {
    out_ += "b'";
    for (const std::byte byte : bytes) {
      if (full()) return;
      add_byte(std::to_integer<std::uint32_t>(byte));
    }
    out_ += '\'';
  }

  void add_byte(std::uint32_t code) {
    if (code == '\'' || code == '\\') out_ += '\\';
    if (code < 0x20 || code >= 0x7f) {
      append_escape(out_, code);
    } else {
      out_ += static_cast<char>(code);
    }
  }

  // Between `open` and `close` what `add_one` makes of each, with commas.
  template <typename Items, typename AddOne>
  void add_each(std::string_view open, const Items& items, std::string_view close, AddOne add_one) {
    out_ += open;
    for (const auto& item : items) {
      if (full()) return;
      if (&item != &items.front()) out_ += ", ";
      add_one(item);
    }
    out_ += close;
  }

  void add_items(std::string_view open, const Value::List& items, std::string_view close,
                 int depth) {
    add_each(open, items, close, [this, depth](const Value& item) { add(item, depth + 1); });
  }

  void add_pairs(std::string_view open, const std::vector<Value::Pair>& pairs,
                 std::string_view close, int depth) {
    add_each(open, pairs, close, [this, depth](const Value::Pair& pair) {
      add(pair.first, depth + 1);
      out_ += ": ";
      add(pair.second, depth + 1);
    });
  }

  void add_tensor(const Tensor& tensor) {
    out_ += "tensor(";
    out_ += to_string(tensor.dtype);
    out_ += ", " + to_string(tensor.shape) + ")";
  }

  // Whether the value is of a class that everybody knows.
  bool add_known(const Value& value, int depth) {
    if (const auto array = numpy_array(value)) {
      out_ += numpy_text(*array, cap_ + 1 - out_.size());
      return true;
    }
    const auto known = known_value(value);
    if (!known) return false;
    for (const auto& part : known->parts) {
      if (full()) break;
      if (const auto* text = std::get_if<std::string>(&part)) {
        out_ += *text;
      } else {
        add(std::get<Value>(part), depth + 1);
      }
    }
    return true;
  }

  void add_object(const Object& object, int depth) {
    add(object.callable, depth + 1);
    if (object.arguments.is(Kind::tuple)) {
      add_items("(", object.arguments.items(), ")", depth);
    } else {
      out_ += "()";
    }
    if (object.state) {
      out_ += " state ";
      add(*object.state, depth + 1);
    }
    if (!object.list_items.empty()) add_items(" [", object.list_items, "]", depth);
    if (!object.dict_items.empty()) add_pairs(" {", object.dict_items, "}", depth);
  }

  std::size_t cap_;
  std::string out_;
};

// Python changes to an exponent below 1e-4 and from 1e16 on.
bool has_no_exponent(double value) {
  const double size = std::fabs(value);
  return size == 0 || (size >= 1e-4 && size < 1e16);
}

std::string render_finite(double value) {
  std::array<char, 40> buffer{};
  const bool plain = has_no_exponent(value);
  const auto end = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value,
                                 plain ? std::chars_format::fixed : std::chars_format::scientific);
  std::string text(buffer.data(), end.ptr);
  if (plain && text.find('.') == std::string::npos) text += ".0";
  return text;
}

}  // namespace

std::string_view type_name(DictKind kind) noexcept {
  constexpr std::array<std::string_view, 3> kNames{"dict", "OrderedDict", "defaultdict"};
  return kNames[static_cast<std::size_t>(kind)];
}

std::string_view describe(Value::Kind kind) noexcept {
  constexpr std::array<std::string_view, 16> kNames{
      "None",     "a bool",      "an integer",  "a float",  "a complex number",
      "a string", "bytes",       "a bytearray", "a list",   "a tuple",
      "a set",    "a frozenset", "a dict",      "a tensor", "a global name",
      "an object"};
  static_assert(static_cast<std::size_t>(Kind::object) + 1 == kNames.size());
  return kNames[static_cast<std::size_t>(kind)];
}

namespace {

// What stands behind a backslash, taken off `rest`; false: printable_name() writes no such thing.
bool take_escape(std::string_view& rest, std::string& name) {
  if (rest.empty()) return false;
  constexpr std::string_view kShort = "\\ntr", kMeant = "\\\n\t\r";
  const char kind = rest.front();
  rest.remove_prefix(1);
  if (const std::size_t at = kShort.find(kind); at != std::string_view::npos) {
    name += kMeant[at];
    return true;
  }
  const std::size_t digits = kind == 'x' ? 2 : 4;
  if (!is_one_of(kind, 'x', 'u') || rest.size() < digits) return false;
  std::uint32_t code = 0;
  const auto [end, error] = std::from_chars(rest.data(), rest.data() + digits, code, 16);
  if (error != std::errc() || end != rest.data() + digits) return false;
  rest.remove_prefix(digits);
  if (kind == 'x') {
    name += static_cast<char>(code);
  } else {
    append_utf8(name, code);
  }
  return true;
}

}  // namespace

std::string printable(std::string_view text, std::size_t cap) {
  std::string out;
  if (!append_printable(out, text, cap, 0)) out += "...";
  return out;
}

std::string printable_name(std::string_view name, std::size_t cap) {
  std::string out;
  if (!append_printable(out, name, cap, kOfNames)) out += "...";
  return out;
}

std::optional<std::string> printed_name(std::string_view text) {
  if (text.find('\\') == std::string_view::npos) return std::nullopt;
  std::string name;
  for (std::string_view rest = text; !rest.empty();) {
    if (rest.front() != '\\') {
      name += rest.front();
      rest.remove_prefix(1);
      continue;
    }
    rest.remove_prefix(1);
    if (!take_escape(rest, name)) return std::nullopt;
  }
  // There is one way to print a name.
  return printable_name(name) == text ? std::optional(name) : std::nullopt;
}

std::string render(const Value& value, std::size_t cap) {
  return Renderer(cap).run(value);
}

std::string render_real(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  return render_finite(value);
}

std::string key_text(const Value& key) {
  if (key.is(Kind::string)) return key.as_string();
  if (const auto array = numpy_array(key); array && array->is_scalar) return numpy_number(*array);
  return render(key, 1000);
}

}  // namespace tessera
