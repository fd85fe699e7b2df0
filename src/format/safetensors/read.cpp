#include <algorithm>
#include <array>
#include <numeric>
#include <string_view>

#include "base/numbers.h"
#include "base/sort_runs.h"
#include "base/text.h"
#include "format/safetensors/json.h"
#include "format/safetensors/safetensors.h"
#include "tessera/error.h"

namespace tessera::safetensors {
namespace {

constexpr std::uint64_t kLengthSize = 8;
constexpr int kMaxSkipDepth = 64;
constexpr const char* kMetadata = "__metadata__";

// Receives the header's JSON. A member that returns false stops the parser; `error` says why.
class HeaderHandler : public NumbersAsText {
 public:
  explicit HeaderHandler(Header& header) : header_(header) {}

  bool Null() {
    return skipping() || (where_ == Where::metadata && leave(Where::names)) || refuse("null");
  }
  bool Bool(bool) { return skipping() || refuse("a boolean"); }
  bool RawNumber(const char* text, rapidjson::SizeType size, bool) {
    if (skipping()) return true;
    if (!is_one_of(where_, Where::shape, Where::offsets)) return refuse("a number");
    const auto value = count_of({text, size});
    if (!value)
      return fail(ErrorCode::corrupt, "'" + std::string(text, size) + "' where a count is due");
    return number(*value);
  }
  bool String(const char* text, rapidjson::SizeType size, bool) {
    if (skipping()) return true;
    if (where_ == Where::metadata_value) {
      header_.metadata.emplace(metadata_key_, std::string(text, size));
      return leave(Where::metadata_keys);
    }
    if (where_ != Where::dtype) return refuse("a string");
    try {
      entry().dtype = dtype_from_safetensors({text, size});
    } catch (const Error& found) {
      return fail(found.code(), found.message());
    }
    return leave(Where::fields);
  }

  bool StartObject() {
    if (where_ == Where::skip) return deeper();
    if (where_ == Where::start) return leave(Where::names);
    if (where_ == Where::metadata) return leave(Where::metadata_keys);
    if (where_ == Where::entry) return leave(Where::fields);
    return refuse("an object");
  }
  bool Key(const char* text, rapidjson::SizeType size, bool) {
    const std::string_view key(text, size);
    if (where_ == Where::skip) return true;
    if (where_ == Where::names) return name(key);
    if (where_ == Where::fields) return field(key);
    metadata_key_ = key;
    if (header_.metadata.contains(metadata_key_)) return repeated(key);
    return leave(Where::metadata_value);
  }
  bool EndObject(rapidjson::SizeType) {
    if (where_ == Where::skip) return shallower();
    if (where_ == Where::metadata_keys) return leave(Where::names);
    if (where_ == Where::fields) return finish_entry();
    return leave(Where::end);
  }
  bool StartArray() {
    if (where_ == Where::skip) return deeper();
    if (is_one_of(where_, Where::shape, Where::offsets) && !in_array_) return in_array_ = true;
    return refuse("an array");
  }
  bool EndArray(rapidjson::SizeType count) {
    if (where_ == Where::skip) return shallower();
    in_array_ = false;
    if (where_ == Where::offsets && count != 2) {
      return fail(ErrorCode::corrupt, std::to_string(count) + " data_offsets, expected 2");
    }
    return leave(Where::fields);
  }

  ErrorCode code = ErrorCode::corrupt;
  std::string error;  // empty: the JSON itself is at fault

  // The tensor that is being read; empty: none.
  [[nodiscard]] std::string key() const {
    const bool inside = where_ >= Where::entry && !header_.entries.empty();
    return inside ? header_.entries.back().name : std::string();
  }

 private:
  // The place of what is due next. From `entry` on, the last entry is unfinished.
  enum class Where {
    start,
    end,
    names,
    metadata,
    metadata_keys,
    metadata_value,
    entry,
    fields,
    dtype,
    shape,
    offsets,
    skip
  };
  // Fields of an entry, as bits.
  static constexpr unsigned kDtype = 1, kShape = 2, kOffsets = 4, kAll = 7;
  struct Field {
    std::string_view key;
    unsigned bit = 0;
    Where place = Where::skip;
  };
  static constexpr std::array<Field, 3> kFields = {{
      {"dtype", kDtype, Where::dtype},
      {"shape", kShape, Where::shape},
      {"data_offsets", kOffsets, Where::offsets},
  }};

  bool leave(Where to) {
    where_ = to;
    return true;
  }
  bool fail(ErrorCode with, std::string what) {
    code = with;
    error = std::move(what);
    return false;
  }
  bool refuse(const char* what) {
    return fail(ErrorCode::corrupt, std::string(what) + " where the header has something else");
  }
  bool repeated(std::string_view key) {
    return fail(ErrorCode::corrupt, "'" + std::string(key) + "' appears twice");
  }
  // True for a scalar inside a field that is skipped.
  bool skipping() {
    if (where_ != Where::skip) return false;
    if (depth_ == 0) where_ = Where::fields;
    return true;
  }
  bool deeper() {
    return ++depth_ <= kMaxSkipDepth ||
           fail(ErrorCode::limit, "a field nested deeper than " + std::to_string(kMaxSkipDepth));
  }
  bool shallower() {
    if (--depth_ == 0) where_ = Where::fields;
    return true;
  }

  Entry& entry() { return header_.entries.back(); }

  bool name(std::string_view key) {
    if (key == kMetadata) {
      if (saw_metadata_) return repeated(key);
      saw_metadata_ = true;
      return leave(Where::metadata);
    }
    header_.entries.emplace_back().name = key;
    seen_ = 0;
    return leave(Where::entry);
  }

  bool field(std::string_view key) {
    const auto* known = std::ranges::find(kFields, key, &Field::key);
    if (known == kFields.end()) {
      depth_ = 0;
      return leave(Where::skip);
    }
    if ((seen_ & known->bit) != 0) return repeated(key);
    seen_ |= known->bit;
    offsets_ = 0;
    return leave(known->place);
  }

  bool number(std::uint64_t value) {
    if (!in_array_) return refuse("a number");
    return where_ == Where::offsets ? offset(value) : dimension(value);
  }

  // How many there are is checked at the end of the array.
  bool offset(std::uint64_t value) {
    if (offsets_ < 2) (offsets_ == 0 ? entry().begin : entry().end) = value;
    ++offsets_;
    return true;
  }

  bool dimension(std::uint64_t value) {
    if (!std::in_range<std::int64_t>(value))
      return fail(ErrorCode::corrupt, "a dimension of " + std::to_string(value));
    if (entry().shape.size() == kMaxDimensions) {
      return fail(ErrorCode::limit, "more than " + std::to_string(kMaxDimensions) + " dimensions");
    }
    entry().shape.push_back(static_cast<std::int64_t>(value));
    return true;
  }

  bool finish_entry() {
    if (seen_ != kAll) return fail(ErrorCode::corrupt, "dtype, shape or data_offsets is missing");
    if (entry().dtype == DType::float4_e2m1fn_x2 && !count_pairs(entry().shape)) return false;
    return leave(Where::names);
  }

  // The file counts F4 values, of which a byte of ours has two.
  bool count_pairs(Shape& shape) {
    if (shape.empty() || shape.back() % 2 != 0) {
      return fail(ErrorCode::corrupt,
                  "F4 values that do not fill bytes: shape " + to_string(shape));
    }
    shape.back() /= 2;
    return true;
  }

  Header& header_;
  Where where_ = Where::start;
  std::string metadata_key_;
  bool saw_metadata_ = false;
  bool in_array_ = false;
  unsigned seen_ = 0;  // fields of the entry
  int offsets_ = 0;    // numbers read of data_offsets
  int depth_ = 0;      // inside a skipped field
};

void parse(ByteView bytes, const ByteSource& source, Header& header) {
  HeaderHandler handler(header);
  const auto fail = [&](ErrorCode code, std::string what, std::size_t at) {
    Error error(code, "safetensors header: " + std::move(what));
    if (!handler.key().empty()) error.at_key(handler.key());
    throw error.at_path(source.name()).at_offset(kLengthSize + at);
  };
  if (bytes.empty() || bytes[0] != std::byte{'{'})
    fail(ErrorCode::corrupt, "does not begin with '{'", 0);
  const JsonEnd end = parse_json(bytes, handler);
  if (!end.problem.empty()) fail(handler.code, end.problem, end.at);
  // The parser takes a NUL for the end.
  if (end.at != bytes.size()) fail(ErrorCode::corrupt, "text after the JSON object", end.at);
}

void check_names(const Header& header, const ByteSource& source) {
  std::vector<std::uint32_t> order(header.entries.size());
  std::iota(order.begin(), order.end(), 0U);
  const auto name = [&](std::uint32_t i) -> const std::string& { return header.entries[i].name; };
  sort_runs(order, [&](auto a, auto b) { return name(a) < name(b); });
  for (std::size_t i = 1; i < order.size(); ++i) {
    if (name(order[i - 1]) == name(order[i])) {
      throw Error(ErrorCode::corrupt, "safetensors header: the name appears twice")
          .at_key(name(order[i]))
          .at_path(source.name());
    }
  }
}

// The data of a tensor that begins where the one before ends, at `done`.
void check_place(const Entry& entry, std::uint64_t done, const ByteSource& source) {
  const auto fail = [&](ErrorCode code, const std::string& what) {
    throw Error(code, what).at_key(entry.name).at_path(source.name());
  };
  if (entry.begin > entry.end) fail(ErrorCode::corrupt, "data ends before it begins");
  const auto count = static_cast<std::uint64_t>(numel(entry.shape));
  if (checked_mul<std::uint64_t>(count, size_of(entry.dtype)) != entry.end - entry.begin) {
    fail(ErrorCode::corrupt, "data of " + std::to_string(entry.end - entry.begin) + " bytes for " +
                                 std::string(to_string(entry.dtype)) + " " +
                                 to_string(entry.shape));
  }
  if (entry.begin != done) {
    fail(ErrorCode::corrupt, "data begins at " + std::to_string(entry.begin) + ", expected " +
                                 std::to_string(done) + " where the one before ends");
  }
}

// The file has `size` bytes of data, and the last tensor ends at `end`.
void require_long_enough(const Header& header, std::uint64_t size, std::uint64_t end,
                         const ByteSource& source) {
  if (end <= size) return;
  const auto cut =
      std::ranges::find_if(header.entries, [&](const Entry& entry) { return entry.end > size; });
  throw Error(ErrorCode::incomplete, "data ends at " + std::to_string(cut->end) + " of " +
                                         std::to_string(size) + " bytes; the file lacks " +
                                         std::to_string(end - size) + " bytes at its end")
      .at_key(cut->name)
      .at_path(source.name());
}

// Sorts by place and proves that the tensors tile `size` bytes.
void check_layout(Header& header, std::uint64_t size, bool may_trail, const ByteSource& source) {
  const auto place = [](const Entry& entry) { return std::pair(entry.begin, entry.end); };
  if (!std::ranges::is_sorted(header.entries, {}, place))
    std::ranges::stable_sort(header.entries, {}, place);
  std::uint64_t done = 0;
  for (const Entry& entry : header.entries) {
    check_place(entry, done, source);
    done = entry.end;
  }
  require_long_enough(header, size, done, source);
  header.trailing = size - done;
  if (header.trailing > 0 && !may_trail) {
    throw Error(ErrorCode::corrupt, std::to_string(size - done) + " bytes after the last tensor")
        .at_path(source.name())
        .at_offset(header.data_offset + done);
  }
}

// Bytes of the header's JSON.
std::uint64_t read_length(const ByteSource& source, std::uint64_t limit) {
  const std::uint64_t size = source.size();
  if (size < kLengthSize) {
    throw Error(ErrorCode::incomplete,
                "file of " + std::to_string(size) + " bytes is too short for safetensors")
        .at_path(source.name());
  }
  std::array<std::byte, kLengthSize> bytes{};
  source.read_at(0, bytes);
  const auto length = load_le<std::uint64_t>(bytes.data());
  if (length > limit) {
    throw Error(ErrorCode::limit, "safetensors header of " + std::to_string(length) +
                                      " bytes, at most " + std::to_string(limit) + " are read")
        .at_path(source.name());
  }
  if (length > size - kLengthSize) {
    throw Error(ErrorCode::incomplete, "safetensors header of " + std::to_string(length) +
                                           " bytes in a file of " + std::to_string(size))
        .at_path(source.name());
  }
  return length;
}

}  // namespace

Header read_header(const ByteSource& source, std::uint64_t limit, bool may_trail) {
  const std::uint64_t length = read_length(source, limit);
  std::vector<std::byte> bytes(length);
  source.read_at(kLengthSize, bytes);
  Header header;
  header.data_offset = kLengthSize + length;
  parse(bytes, source, header);
  bytes = {};
  check_names(header, source);
  check_layout(header, source.size() - header.data_offset, may_trail, source);
  return header;
}

}  // namespace tessera::safetensors
