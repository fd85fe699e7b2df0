#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <optional>
#include <string>
#include <type_traits>

#include "base/numbers.h"
#include "base/text.h"
#include "format/gguf/gguf.h"
#include "tessera/error.h"

namespace tessera::gguf {
namespace {

constexpr std::string_view kAlignmentKey = "general.alignment";
constexpr std::uint64_t kUsualAlignment = 32;
constexpr std::uint64_t kFirstWindow = 64U << 10U, kMostWindow = 4U << 20U;

bool is_utf8(std::string_view text) {
  while (!text.empty()) {
    const Rune rune = first_rune(text);
    if (rune.length == 0 || is_surrogate(rune.code)) return false;
    text.remove_prefix(rune.length);
  }
  return true;
}

// Reads from the beginning on, in windows that grow: the header says nowhere how long it is.
class Cursor {
 public:
  Cursor(const ByteSource& source, std::uint64_t limit)
      : source_(source), size_(source.size()), limit_(limit) {}

  [[nodiscard]] std::uint64_t at() const { return at_; }

  // That `count` things of at least `each` bytes follow: asked before anything is made for them.
  void require(std::uint64_t count, std::uint64_t each, const char* what) const {
    if (count > (limit_ - at_) / each) {
      throw Error(ErrorCode::limit, std::to_string(count) + " " + what + ", where at most " +
                                        std::to_string(limit_) + " bytes before the data are read");
    }
    if (count > (size_ - at_) / each) {
      throw Error(ErrorCode::incomplete, std::to_string(count) + " " + what + ", where " +
                                             std::to_string(size_ - at_) + " bytes are left");
    }
  }

  template <typename T>
  T number() {
    std::array<std::byte, sizeof(T)> bytes{};
    require(1, sizeof(T), "numbers");
    read(bytes);
    return load_le<T>(bytes.data());
  }
  std::vector<std::byte> bytes(std::uint64_t count) {
    require(count, 1, "bytes");
    std::vector<std::byte> bytes(count);
    read(bytes);
    return bytes;
  }
  std::string text(std::uint64_t most, const char* what) {
    const auto count = number<std::uint64_t>();
    if (count > most) {
      throw Error(ErrorCode::limit, std::string(what) + " of " + std::to_string(count) +
                                        " bytes, at most " + std::to_string(most) + " are read");
    }
    require(count, 1, "bytes of a text");
    std::string text(count, '\0');
    read(std::as_writable_bytes(std::span(text)));
    return text;
  }

 private:
  void read(MutableByteView out) {
    while (!out.empty()) {
      if (at_ == window_end_) fill();
      const std::uint64_t part = std::min<std::uint64_t>(out.size(), window_end_ - at_);
      const std::byte* const from = window_.data() + (window_.size() - (window_end_ - at_));
      std::memcpy(out.data(), from, part);
      out = out.subspan(part);
      at_ += part;
    }
  }
  void fill() {
    window_.resize(std::min(next_, size_ - at_));
    source_.read_at(at_, window_);
    window_end_ = at_ + window_.size();
    next_ = std::min(2 * next_, kMostWindow);
  }

  const ByteSource& source_;
  const std::uint64_t size_;
  const std::uint64_t limit_;
  std::uint64_t at_ = 0;
  std::vector<std::byte> window_;
  std::uint64_t window_end_ = 0;
  std::uint64_t next_ = kFirstWindow;
};

enum class ValueType : std::uint32_t {
  uint8,
  int8,
  uint16,
  int16,
  uint32,
  int32,
  float32,
  boolean,
  string,
  array,
  uint64,
  int64,
  float64,
};
// The least bytes of a value of each type: a string has its length, an array a type and a length.
constexpr std::array<std::uint64_t, 13> kLeastBytes{1, 1, 2, 2, 4, 4, 4, 1, 8, 12, 8, 8, 8};
constexpr std::uint64_t kLeastKeyValue = 8 + 4 + 1;      // an empty key, its type, a byte
constexpr std::uint64_t kLeastInfo = 8 + 4 + 0 + 4 + 8;  // a scalar without a name

std::uint64_t padded(std::uint64_t size, std::uint64_t alignment) {
  return checked_add(size, alignment - 1) / alignment * alignment;
}

class Reader {
 public:
  Reader(const ByteSource& source, std::uint64_t limit) : in_(source, limit) {}

  [[nodiscard]] std::uint64_t at() const { return in_.at(); }
  [[nodiscard]] std::uint64_t alignment() const { return alignment_; }

  void read(Header& header) {
    require_version();
    const auto tensors = in_.number<std::uint64_t>();
    const auto values = in_.number<std::uint64_t>();
    require_count(tensors, kLeastInfo, "tensors");
    require_count(values, kLeastKeyValue, "key-values");
    header.values.reserve(values);
    for (std::uint64_t i = 0; i < values; ++i) header.values.push_back(key_value());
    require_count(tensors, kLeastInfo, "tensors");
    header.entries.reserve(tensors);
    for (std::uint64_t i = 0; i < tensors; ++i) header.entries.push_back(entry());
  }

 private:
  void require_version() {
    const std::vector<std::byte> magic = in_.bytes(kMagic.size());
    if (std::memcmp(magic.data(), kMagic.data(), kMagic.size()) != 0)
      throw Error(ErrorCode::corrupt, "does not begin with GGUF").at_offset(0);
    const auto version = in_.number<std::uint32_t>();
    if (is_one_of(version, 2U, 3U)) return;
    constexpr std::uint32_t kLowHalf = 0xffff;
    const std::string found = version != 0 && (version & kLowHalf) == 0
                                  ? "a big-endian GGUF file"
                                  : "GGUF of version " + std::to_string(version);
    throw Error(ErrorCode::unsupported, found + ", expected little-endian and version 2 or 3")
        .at_offset(kMagic.size());
  }

  void require_count(std::uint64_t count, std::uint64_t each, const char* what) const {
    if (count > kMostEntries) {
      throw Error(ErrorCode::limit, std::to_string(count) + " " + what + ", at most " +
                                        std::to_string(kMostEntries) + " are read");
    }
    in_.require(count, each, what);
  }

  std::string name(const char* what) {
    const std::uint64_t begin = in_.at();
    std::string name = in_.text(kMostNameBytes, what);
    if (!is_utf8(name))
      throw Error(ErrorCode::corrupt, std::string(what) + " that is not UTF-8").at_offset(begin);
    return name;
  }

  std::pair<std::string, Value> key_value() {
    const std::uint64_t begin = in_.at();
    std::string key = name("a key");
    if (key.empty()) throw Error(ErrorCode::corrupt, "a key without letters").at_offset(begin);
    try {
      const ValueType type = value_type();
      Value value = this->value(type, 0);
      if (key == kAlignmentKey) take_alignment(type, value);
      return {std::move(key), std::move(value)};
    } catch (Error& error) {
      throw error.at_key(key);
    }
  }

  ValueType value_type() {
    const auto type = in_.number<std::uint32_t>();
    if (type >= kLeastBytes.size())
      throw Error(ErrorCode::unsupported, "a value of type " + std::to_string(type));
    return static_cast<ValueType>(type);
  }

  void take_alignment(ValueType type, const Value& value) {
    if (type != ValueType::uint32)
      throw Error(ErrorCode::corrupt, "the alignment is no value of type u32");
    alignment_ = static_cast<std::uint64_t>(value.as_int());
    if (!std::has_single_bit(alignment_)) {
      throw Error(ErrorCode::corrupt,
                  "an alignment of " + std::to_string(alignment_) + ", expected a power of two");
    }
    if (alignment_ > kMostAlignment) {
      throw Error(ErrorCode::limit, "an alignment of " + std::to_string(alignment_) +
                                        " bytes, expected at most " +
                                        std::to_string(kMostAlignment));
    }
  }

  // `depth`: of the array that the value is an element of.
  Value value(ValueType type, int depth) {
    switch (type) {
      case ValueType::uint8:
        return in_.number<std::uint8_t>();
      case ValueType::int8:
        return in_.number<std::int8_t>();
      case ValueType::uint16:
        return in_.number<std::uint16_t>();
      case ValueType::int16:
        return in_.number<std::int16_t>();
      case ValueType::uint32:
        return in_.number<std::uint32_t>();
      case ValueType::int32:
        return in_.number<std::int32_t>();
      case ValueType::float32:
        return in_.number<float>();
      case ValueType::boolean:
        return boolean();
      case ValueType::string:
        return string();
      case ValueType::array:
        return array(depth + 1);
      case ValueType::uint64:
        return in_.number<std::uint64_t>();
      case ValueType::int64:
        return in_.number<std::int64_t>();
      case ValueType::float64:
        break;
    }
    return in_.number<double>();
  }

  bool boolean() {
    const auto byte = in_.number<std::uint8_t>();
    if (byte > 1) throw Error(ErrorCode::corrupt, "a boolean of " + std::to_string(byte));
    return byte == 1;
  }

  Value string() {
    // The header's limit is the text's.
    std::string text = in_.text(~std::uint64_t{0}, "a text");
    if (is_utf8(text)) return Value(std::move(text));
    const auto bytes = std::as_bytes(std::span(text));
    return Value::bytes({bytes.begin(), bytes.end()});
  }

  Value array(int depth) {
    if (depth > kMostNesting) {
      throw Error(ErrorCode::limit,
                  "arrays inside one another, more than " + std::to_string(kMostNesting));
    }
    const ValueType type = value_type();
    const auto count = in_.number<std::uint64_t>();
    in_.require(count, kLeastBytes[static_cast<std::size_t>(type)], "elements of an array");
    if (type == ValueType::uint8) return Value::bytes(in_.bytes(count));
    // A byte of the file may become a value of many bytes in memory.
    values_ = checked_add(values_, count);
    if (values_ > kMostValues) {
      throw Error(ErrorCode::limit, std::to_string(values_) + " elements in arrays, at most " +
                                        std::to_string(kMostValues) + " are read");
    }
    Value::List items;
    items.reserve(count);
    for (std::uint64_t i = 0; i < count; ++i) items.push_back(value(type, depth));
    return Value::list(std::move(items));
  }

  // Its place counts from the start of the data, which nobody knows yet.
  Entry entry() {
    Entry entry;
    entry.name = name("a tensor's name");
    try {
      entry.shape = shape();
      entry.type = &type_of(in_.number<std::uint32_t>());
      entry.begin = in_.number<std::uint64_t>();
      entry.end = checked_add(entry.begin, size_of(entry));
      if (entry.begin % alignment_ == 0) return entry;
      throw Error(ErrorCode::corrupt, "data at " + std::to_string(entry.begin) +
                                          ", which is no multiple of the alignment " +
                                          std::to_string(alignment_));
    } catch (Error& error) {
      throw error.at_key(entry.name);
    }
  }

  Shape shape() {
    const auto dimensions = in_.number<std::uint32_t>();
    if (dimensions > kMostDimensions) {
      throw Error(ErrorCode::limit, std::to_string(dimensions) + " dimensions, expected at most " +
                                        std::to_string(kMostDimensions));
    }
    Shape shape(dimensions);
    for (std::uint32_t d = dimensions; d-- > 0;) {
      const auto size = in_.number<std::uint64_t>();
      if (size == 0 || !std::in_range<std::int64_t>(size))
        throw Error(ErrorCode::corrupt, "a dimension of " + std::to_string(size));
      shape[d] = static_cast<std::int64_t>(size);
    }
    return shape;
  }

  // In bytes; a row has whole blocks.
  static std::uint64_t size_of(const Entry& entry) {
    const ElementType& type = *entry.type;
    const std::int64_t row = entry.shape.empty() ? 1 : entry.shape.back();
    if (row % type.elements != 0) {
      throw Error(ErrorCode::corrupt, "rows of " + std::to_string(row) + " elements in blocks of " +
                                          std::to_string(type.elements) + " (" +
                                          std::string(type.name) + ")");
    }
    return static_cast<std::uint64_t>(checked_mul(numel(entry.shape) / type.elements, type.bytes));
  }

  Cursor in_;
  std::uint64_t alignment_ = kUsualAlignment;
  std::uint64_t values_ = 0;  // in arrays
};

void require_once(std::vector<std::string_view> names, const char* what) {
  std::ranges::sort(names);
  const auto twice = std::ranges::adjacent_find(names);
  if (twice == names.end()) return;
  throw Error(ErrorCode::corrupt, std::string(what) + " appears twice").at_key(std::string(*twice));
}

void require_own_names(const Header& header) {
  std::vector<std::string_view> names;
  names.reserve(header.values.size());
  for (const auto& [key, value] : header.values) names.push_back(key);
  require_once(std::move(names), "the key");
  std::vector<std::string_view> tensors;
  tensors.reserve(header.entries.size());
  for (const Entry& entry : header.entries) tensors.push_back(entry.name);
  require_once(std::move(tensors), "the tensor's name");
}

// Sorts by place and proves that the tensors tile what follows `data`, but for padding.
void require_layout(Header& header, std::uint64_t data, std::uint64_t alignment) {
  std::ranges::stable_sort(header.entries, {}, &Entry::begin);
  std::uint64_t due = data;
  for (Entry& entry : header.entries) {
    try {
      entry.begin = checked_add(entry.begin, data);
      entry.end = checked_add(entry.end, data);
      if (entry.begin != due) {
        throw Error(ErrorCode::corrupt, "data begins at byte " + std::to_string(entry.begin) +
                                            ", expected " + std::to_string(due) +
                                            " behind the tensor before it");
      }
      due = padded(entry.end, alignment);
    } catch (Error& error) {
      throw error.at_key(entry.name);
    }
  }
}

// Writers may leave out the padding of the last tensor.
void require_length(Header& header, std::uint64_t size, std::uint64_t data,
                    std::uint64_t alignment) {
  for (const Entry& entry : header.entries) {
    if (entry.end <= size) continue;
    throw Error(ErrorCode::incomplete, "data ends at byte " + std::to_string(entry.end) + " of " +
                                           std::to_string(size) + "; the file lacks " +
                                           std::to_string(header.entries.back().end - size) +
                                           " bytes at its end")
        .at_key(entry.name);
  }
  const std::uint64_t end =
      header.entries.empty() ? data : padded(header.entries.back().end, alignment);
  header.trailing = size > end ? size - end : 0;
}

}  // namespace

Header read_header(const ByteSource& source, std::uint64_t limit) {
  Header header;
  Reader reader(source, limit);
  try {
    reader.read(header);
  } catch (Error& error) {
    throw error.at_path(source.name()).at_offset(reader.at());
  }
  try {
    require_own_names(header);
    const std::uint64_t data = padded(reader.at(), reader.alignment());
    require_layout(header, data, reader.alignment());
    require_length(header, source.size(), data, reader.alignment());
  } catch (Error& error) {
    throw error.at_path(source.name());
  }
  return header;
}

}  // namespace tessera::gguf
