#include "value/known.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <utility>

#include "base/text.h"
#include "value/integer.h"

namespace tessera {
namespace {

using Kind = Value::Kind;

constexpr std::string_view kLowHex = "0123456789abcdef";

// Builtins.

KnownParts parts_of_range(const Object& object) {
  const auto* given = call_arguments(object);
  if (given == nullptr || given->size() != 3) return std::nullopt;
  for (const Value& part : *given)
    if (!part.is(Kind::integer)) return std::nullopt;
  if (is_integer((*given)[2], 0)) return std::nullopt;
  if (is_integer((*given)[2], 1)) return written("range(", (*given)[0], ", ", (*given)[1], ")");
  return written("range(", (*given)[0], ", ", (*given)[1], ", ", (*given)[2], ")");
}

KnownParts parts_of_slice(const Object& object) {
  const auto* given = call_arguments(object);
  if (given == nullptr || given->size() != 3) return std::nullopt;
  return written("slice(", (*given)[0], ", ", (*given)[1], ", ", (*given)[2], ")");
}

// Containers.

constexpr double kPastIntegers = 9223372036854775808.0;  // 2^63

// Whether a < b, to the last bit. NaN is not among them.
bool is_less(std::int64_t a, double b) {
  if (b >= kPastIntegers) return true;
  return b > -kPastIntegers && a < static_cast<std::int64_t>(std::ceil(b));
}

bool is_less(double a, std::int64_t b) {
  return a < kPastIntegers && (a < -kPastIntegers || static_cast<std::int64_t>(std::floor(a)) < b);
}

template <typename Number>
bool is_less(Number a, Number b) {
  return a < b;
}

using Count = std::variant<std::int64_t, double>;

// nullopt: it is no real number, or one of more than 64 bits.
std::optional<Count> count_of(const Value& value) {
  if (value.is(Kind::boolean)) return Count(static_cast<std::int64_t>(value.as_bool() ? 1 : 0));
  if (value.is(Kind::real) && !std::isnan(value.as_real())) return Count(value.as_real());
  const auto integer = small_integer(value);
  return integer ? std::optional<Count>(*integer) : std::nullopt;
}

// The largest number first, as repr has them; nullopt: nobody but Python knows how these compare.
std::optional<std::vector<Value::Pair>> most_common(const Value& counts) {
  std::vector<std::pair<Count, const Value::Pair*>> found;
  // What compares with nothing leaves the order as it is, and so does one count alone.
  const bool stays = counts.size() < 2 || std::ranges::any_of(counts.pairs(), [](const auto& pair) {
                       return is_one_of(pair.second.kind(), Kind::none, Kind::complex, Kind::dict);
                     });
  if (stays) return counts.pairs();
  for (const Value::Pair& pair : counts.pairs()) {
    const auto count = count_of(pair.second);
    if (!count) return std::nullopt;
    found.emplace_back(*count, &pair);
  }
  std::ranges::stable_sort(found, [](const auto& a, const auto& b) {
    return std::visit([](auto x, auto y) { return is_less(y, x); }, a.first, b.first);
  });
  std::vector<Value::Pair> pairs;
  for (const auto& [count, pair] : found) pairs.push_back(*pair);
  return pairs;
}

KnownParts parts_of_counter(const Object& object) {
  const auto* given = call_arguments(object);
  if (given == nullptr || given->size() != 1 || !(*given)[0].is(Kind::dict) ||
      (*given)[0].dict_kind() != DictKind::dict)
    return std::nullopt;
  if ((*given)[0].size() == 0) return written("Counter()");
  auto pairs = most_common((*given)[0]);
  if (!pairs) return std::nullopt;
  return written("Counter(", Value::dict(*std::move(pairs)), ")");
}

// deque(), deque((), 3) and then the items, or deque([1, 2], 3). Null: there are both.
const Value::List* items_of_deque(const Object& object) {
  const auto& given = object.arguments.items();
  if (given.empty()) return &object.list_items;
  if (!is_one_of(given[0].kind(), Kind::tuple, Kind::list)) return nullptr;
  if (object.list_items.empty()) return &given[0].items();
  return given[0].size() == 0 ? &object.list_items : nullptr;
}

KnownParts parts_of_deque(const Object& object) {
  if (!object.arguments.is(Kind::tuple) || object.by_new || object.keywords || object.state ||
      !object.dict_items.empty() || object.arguments.size() > 2)
    return std::nullopt;
  const Value::List* items = items_of_deque(object);
  if (items == nullptr) return std::nullopt;
  const auto& given = object.arguments.items();
  if (given.size() < 2 || given[1].is(Kind::none))
    return written("deque(", Value::list(*items), ")");
  const auto most = small_integer(given[1]);
  if (!most || *most < 0 || std::cmp_less(*most, items->size())) return std::nullopt;
  return written("deque(", Value::list(*items), ", maxlen=" + std::to_string(*most) + ")");
}

// Numbers.

std::size_t digits_at(std::string_view text) {
  return std::min(text.find_first_not_of("0123456789"), text.size());
}

// Takes digits off, which may be none.
std::size_t take_digits(std::string_view& text) {
  const std::size_t count = digits_at(text);
  text.remove_prefix(count);
  return count;
}

// As str(Decimal) writes it.
bool is_decimal(std::string_view text) {
  if (text.starts_with('-')) text.remove_prefix(1);
  if (text == "Infinity") return true;
  if (text.starts_with("sNaN") || text.starts_with("NaN")) {
    text.remove_prefix(text.find("NaN") + 3);
    return digits_at(text) == text.size();
  }
  if (take_digits(text) == 0) return false;
  if (text.starts_with('.')) {
    text.remove_prefix(1);
    if (take_digits(text) == 0) return false;
  }
  if (!text.starts_with('E')) return text.empty();
  text.remove_prefix(1);
  if (!text.starts_with('+') && !text.starts_with('-')) return false;
  text.remove_prefix(1);
  return take_digits(text) > 0 && text.empty();
}

KnownParts parts_of_decimal(const Object& object) {
  const auto* given = call_arguments(object);
  if (given == nullptr || given->size() != 1 || !(*given)[0].is(Kind::string) ||
      !is_decimal((*given)[0].as_string()))
    return std::nullopt;
  return written("Decimal(", (*given)[0], ")");
}

std::optional<std::int64_t> number_of_digits(std::string_view text) {
  const bool is_negative = text.starts_with('-');
  const std::string_view digits = text.substr(is_negative ? 1 : 0);
  if (digits.empty() || digits.size() > 18 || digits_at(digits) != digits.size())
    return std::nullopt;
  return std::stoll(std::string(text));
}

// Fraction(1, 3), or as Python up to 3.10 has it Fraction('1/3').
KnownParts parts_of_fraction(const Object& object) {
  const auto* given = call_arguments(object);
  std::optional<std::int64_t> above, below;
  if (given != nullptr && given->size() == 2) {
    above = small_integer((*given)[0]);
    below = small_integer((*given)[1]);
  } else if (given != nullptr && given->size() == 1 && (*given)[0].is(Kind::string)) {
    const std::string_view text = (*given)[0].as_string();
    const std::size_t slash = text.find('/');
    above = number_of_digits(text.substr(0, slash));
    below = slash == std::string_view::npos ? 1 : number_of_digits(text.substr(slash + 1));
  }
  // One that is not reduced is no fraction's own.
  if (!above || !below || *below < 1 || *above == INT64_MIN || std::gcd(*above, *below) != 1)
    return std::nullopt;
  return written("Fraction(" + std::to_string(*above) + ", " + std::to_string(*below) + ")");
}

// UUID.__new__(UUID), which then gets a state.
bool is_made_uuid(const Object& object) {
  return object.by_new && object.arguments.is(Kind::tuple) && object.arguments.size() == 0 &&
         !object.keywords && object.list_items.empty() && object.dict_items.empty();
}

// The number of a UUID, little end first; nullopt: the state is none of one.
std::optional<std::vector<std::byte>> bytes_of_uuid(const Value& state) {
  const Value* number = nullptr;
  for (const auto& [key, value] : state.pairs()) {
    const bool is_flag = is_text(key, "is_safe") && (is_integer(value, 0) || is_integer(value, -1));
    if (is_text(key, "int") && value.is(Kind::integer)) {
      number = &value;
    } else if (!is_flag) {
      return std::nullopt;
    }
  }
  if (number == nullptr) return std::nullopt;
  std::vector<std::byte> bytes = integer_to_bytes(number->as_integer());
  bytes.resize(std::max<std::size_t>(bytes.size(), 1));
  const bool is_negative = (bytes.back() & std::byte{0x80}) != std::byte{0};
  if (is_negative || bytes.size() > 17 || (bytes.size() == 17 && bytes.back() != std::byte{0}))
    return std::nullopt;
  bytes.resize(16);
  return bytes;
}

KnownParts parts_of_uuid(const Object& object) {
  if (!is_made_uuid(object) || !object.state || !object.state->is(Kind::dict)) return std::nullopt;
  const auto bytes = bytes_of_uuid(*object.state);
  if (!bytes) return std::nullopt;
  std::string text;
  for (std::size_t i = 16; i-- > 0;) {
    const auto byte = std::to_integer<std::size_t>((*bytes)[i]);
    text += kLowHex[byte >> 4U];
    text += kLowHex[byte & 15U];
    if (is_one_of(i, 12U, 10U, 8U, 6U)) text += '-';
  }
  return written("UUID('" + text + "')");
}

// Paths.

// The parts put together as pathlib does: an absolute one begins anew.
std::string joined_path(const std::vector<Value>& parts) {
  std::string path;
  for (const Value& part : parts) {
    if (part.as_string().starts_with('/')) path.clear();
    if (!path.empty() && !path.ends_with('/')) path += '/';
    path += part.as_string();
  }
  const std::size_t slashes = std::min(path.find_first_not_of('/'), path.size());
  std::string plain(slashes == 2 ? 2 : std::min<std::size_t>(slashes, 1), '/');
  for (std::string_view rest = std::string_view(path).substr(slashes); !rest.empty();) {
    const std::size_t end = std::min(rest.find('/'), rest.size());
    const std::string_view name = rest.substr(0, end);
    rest.remove_prefix(std::min(end + 1, rest.size()));
    if (name.empty() || name == ".") continue;
    if (!plain.empty() && !plain.ends_with('/')) plain += '/';
    plain += name;
  }
  return plain.empty() ? "." : plain;
}

bool are_strings(const std::vector<Value>& values) {
  return std::ranges::all_of(values, [](const Value& value) { return value.is(Kind::string); });
}

KnownParts parts_of_path(const Object& object) {
  const auto* given = call_arguments(object);
  if (given == nullptr || !are_strings(*given)) return std::nullopt;
  return written(object.callable.global_name() + "(", Value(joined_path(*given)), ")");
}

// "c:", which may have a root behind it or none.
std::string_view drive_of(std::string_view text) {
  const bool has_letter =
      !text.empty() && ((text[0] >= 'a' && text[0] <= 'z') || (text[0] >= 'A' && text[0] <= 'Z'));
  return has_letter && text.substr(1).starts_with(':') ? text.substr(0, 2) : std::string_view();
}

// Of Windows: relative, or with a drive at the beginning. What else has a root, a drive or a stream
// stays a call.
KnownParts parts_of_windows_path(const Object& object) {
  const auto* given = call_arguments(object);
  if (given == nullptr || !are_strings(*given)) return std::nullopt;
  std::string start;
  std::vector<Value> parts;
  for (const Value& part : *given) {
    std::string text = part.as_string();
    std::ranges::replace(text, '\\', '/');
    if (parts.empty()) start = drive_of(text);
    text.erase(0, parts.empty() ? start.size() : 0);
    if (parts.empty() && !start.empty() && text.starts_with('/')) {
      start += '/';
      text.erase(0, text.find_first_not_of('/'));
    }
    if (text.starts_with('/') || text.find(':') != std::string::npos) return std::nullopt;
    parts.emplace_back(std::move(text));
  }
  const std::string rest = joined_path(parts);
  const bool is_start = rest == "." && !start.empty();
  return written(object.callable.global_name() + "(", Value(is_start ? start : start + rest), ")");
}

// torch's and numpy's.

KnownParts parts_of_device(const Object& object) {
  const auto* given = call_arguments(object);
  if (given == nullptr || given->empty() || given->size() > 2 || !(*given)[0].is(Kind::string))
    return std::nullopt;
  const std::string& type = (*given)[0].as_string();
  if (type.empty() || type.find_first_not_of("abcdefghijklmnopqrstuvwxyz") != std::string::npos)
    return std::nullopt;
  if (given->size() == 1) return written("device(type=", (*given)[0], ")");
  const auto index = small_integer((*given)[1]);
  if (!index || *index < 0 || *index > 127) return std::nullopt;
  return written("device(type=", (*given)[0], ", index=" + std::to_string(*index) + ")");
}

KnownParts parts_of_size(const Object& object) {
  const auto* given = call_arguments(object);
  if (given == nullptr || given->size() != 1 || !(*given)[0].is(Kind::tuple)) return std::nullopt;
  for (const Value& size : (*given)[0].items())
    if (!small_integer(size)) return std::nullopt;
  return written("torch.Size(", Value::list((*given)[0].items()), ")");
}

KnownParts parts_of_numpy_dtype(const Object& object) {
  const auto dtype = numpy_dtype(object);
  if (!dtype) return std::nullopt;
  if (dtype->big_endian) return written("dtype('>" + std::string(dtype->code) + "')");
  return written("dtype('" + std::string(to_string(dtype->dtype)) + "')");
}

struct Class {
  std::string_view module;
  std::string_view name;
  std::string_view type;
  KnownParts (*parts_of)(const Object& object);
};

constexpr auto kClasses = std::to_array<Class>({
    {"builtins", "range", "range", parts_of_range},
    {"builtins", "slice", "slice", parts_of_slice},
    {"collections", "Counter", "collections.Counter", parts_of_counter},
    {"collections", "deque", "collections.deque", parts_of_deque},
    {"datetime", "date", "datetime.date", parts_of_date},
    {"datetime", "datetime", "datetime.datetime", parts_of_datetime},
    {"datetime", "time", "datetime.time", parts_of_time},
    {"datetime", "timedelta", "datetime.timedelta", parts_of_timedelta},
    {"datetime", "timezone", "datetime.timezone", parts_of_timezone},
    {"decimal", "Decimal", "decimal.Decimal", parts_of_decimal},
    {"fractions", "Fraction", "fractions.Fraction", parts_of_fraction},
    {"numpy", "dtype", "numpy.dtype", parts_of_numpy_dtype},
    {"pathlib", "PosixPath", "pathlib.PosixPath", parts_of_path},
    {"pathlib", "PurePosixPath", "pathlib.PurePosixPath", parts_of_path},
    {"pathlib", "PureWindowsPath", "pathlib.PureWindowsPath", parts_of_windows_path},
    {"pathlib", "WindowsPath", "pathlib.WindowsPath", parts_of_windows_path},
    // Where Python 3.13 has them.
    {"pathlib._local", "PosixPath", "pathlib.PosixPath", parts_of_path},
    {"pathlib._local", "PurePosixPath", "pathlib.PurePosixPath", parts_of_path},
    {"pathlib._local", "PureWindowsPath", "pathlib.PureWindowsPath", parts_of_windows_path},
    {"pathlib._local", "WindowsPath", "pathlib.WindowsPath", parts_of_windows_path},
    {"torch", "Size", "torch.Size", parts_of_size},
    {"torch", "device", "torch.device", parts_of_device},
    {"uuid", "UUID", "uuid.UUID", parts_of_uuid},
});

struct Constant {
  std::string_view module;
  std::string_view name;
  std::string_view type;
};

constexpr auto kConstants = std::to_array<Constant>({
    {"builtins", "Ellipsis", "ellipsis"},
    {"builtins", "NotImplemented", "NotImplementedType"},
});

// Dtypes of torch that no tensor of a tree has.
constexpr auto kOtherDTypes = std::to_array<std::string_view>(
    {"bits16", "bits1x8", "bits2x4", "bits4x2", "bits8",  "int1",  "int2",     "int3",
     "int4",   "int5",    "int6",    "int7",    "qint32", "qint8", "quint2x4", "quint4x2",
     "quint8", "uint1",   "uint2",   "uint3",   "uint4",  "uint5", "uint6",    "uint7"});

std::optional<KnownValue> known_constant(const Value& value) {
  for (const Constant& row : kConstants)
    if (is_global(value, row.module, row.name))
      return KnownValue{row.type, {std::string(row.name)}};
  if (value.global_module() != "torch" || !is_torch_dtype(value.global_name())) return std::nullopt;
  return KnownValue{"torch.dtype", {"torch." + std::string(value.global_name())}};
}

}  // namespace

bool is_torch_dtype(std::string_view name) {
  return std::ranges::find(dtype_table(), name, &DTypeInfo::torch) != dtype_table().end() ||
         std::ranges::find(kOtherDTypes, name) != kOtherDTypes.end();
}

std::optional<KnownValue> known_value(const Value& value) {
  if (value.is(Kind::global)) return known_constant(value);
  if (!value.is(Kind::object)) return std::nullopt;
  const Object& object = value.as_object();
  if (!object.callable.is(Kind::global)) return std::nullopt;
  for (const Class& row : kClasses) {
    if (!is_global(object.callable, row.module, row.name)) continue;
    KnownParts parts = row.parts_of(object);
    if (!parts) return std::nullopt;
    return KnownValue{row.type, std::move(*parts)};
  }
  return std::nullopt;
}

const std::vector<Value>* call_arguments(const Object& object) {
  return is_plain_call(object) && !object.state ? &object.arguments.items() : nullptr;
}

std::optional<std::int64_t> small_integer(const Value& value) {
  if (!value.is(Kind::integer) || !value.as_integer().big.empty()) return std::nullopt;
  return value.as_integer().small;
}

}  // namespace tessera
