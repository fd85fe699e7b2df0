// Hostile archives, built field by field: reliability Z01, Z02, Z06 to Z12, Z14 to Z16, Z20, Z22.
#include <gtest/gtest.h>

#include <functional>
#include <optional>

#include "base/crc32.h"
#include "base/numbers.h"
#include "format/test_support.h"
#include "format/zip/zip.h"

namespace tessera::zip {
namespace {

using Bytes = std::vector<std::byte>;

void append(Bytes& to, const std::string& text) {
  for (const char c : text) to.push_back(static_cast<std::byte>(c));
}

// An entry whose two headers say what a test wants them to.
struct Made {
  std::string name;
  std::string data;
  std::string local_name{};  // empty: `name`
  std::uint16_t flags = 0;
  std::uint16_t method = 0;
  std::uint16_t disk = 0;
  std::string local_extra{};
  std::string extra{};                    // of the directory
  std::optional<std::uint32_t> size{};    // that both headers say
  std::optional<std::uint32_t> offset{};  // that the directory says
};

struct Tail {
  std::optional<std::uint16_t> count{};
  std::optional<std::uint32_t> directory_size{};
  std::string comment;
  bool has_end = true;
};

Bytes raw(const std::vector<Made>& entries, const Tail& tail = {}) {
  Bytes file;
  Bytes directory;
  for (const Made& made : entries) {
    const std::uint32_t crc = crc32(std::as_bytes(std::span(made.data)));
    const auto size = made.size.value_or(static_cast<std::uint32_t>(made.data.size()));
    const std::string local = made.local_name.empty() ? made.name : made.local_name;
    const auto at = static_cast<std::uint32_t>(file.size());
    const auto common = [&](Bytes& to, const std::string& name, const std::string& extra) {
      append_le<std::uint16_t>(to, 20);  // version needed
      append_le(to, made.flags);
      append_le(to, made.method);
      append_le<std::uint32_t>(to, 0);  // time
      append_le(to, crc);
      append_le(to, size);
      append_le(to, size);
      append_le(to, static_cast<std::uint16_t>(name.size()));
      append_le(to, static_cast<std::uint16_t>(extra.size()));
    };
    append_le(file, kLocalHeader);
    common(file, local, made.local_extra);
    append(file, local + made.local_extra + made.data);
    append_le(directory, kCentralHeader);
    append_le<std::uint16_t>(directory, 0);  // version made by
    common(directory, made.name, made.extra);
    append_le<std::uint16_t>(directory, 0);  // comment
    append_le(directory, made.disk);
    append_le<std::uint16_t>(directory, 0);
    append_le<std::uint32_t>(directory, 0);
    append_le(directory, made.offset.value_or(at));
    append(directory, made.name + made.extra);
  }
  const auto start = static_cast<std::uint32_t>(file.size());
  file.insert(file.end(), directory.begin(), directory.end());
  if (!tail.has_end) return file;
  const auto count = tail.count.value_or(static_cast<std::uint16_t>(entries.size()));
  append_le(file, kEnd);
  append_le<std::uint32_t>(file, 0);
  append_le(file, count);
  append_le(file, count);
  append_le(file, tail.directory_size.value_or(static_cast<std::uint32_t>(directory.size())));
  append_le(file, start);
  append_le(file, static_cast<std::uint16_t>(tail.comment.size()));
  append(file, tail.comment);
  return file;
}

std::string field64(const std::vector<std::uint64_t>& numbers) {
  Bytes bytes;
  append_le(bytes, kZip64Field);
  append_le(bytes, static_cast<std::uint16_t>(numbers.size() * 8));
  for (const std::uint64_t number : numbers) append_le(bytes, number);
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

Made with(const std::function<void(Made&)>& change) {
  Made made;
  made.name = "a/data.pkl";
  made.data = "pickle";
  change(made);
  return made;
}

// An end record of an archive without entries whose directory begins at `start`.
std::string empty_end(std::uint32_t start) {
  Bytes bytes;
  append_le(bytes, kEnd);
  append_le<std::uint64_t>(bytes, 0);
  append_le<std::uint32_t>(bytes, 0);
  append_le(bytes, start);
  append_le<std::uint16_t>(bytes, 0);
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

struct Row {
  const char* what;
  Bytes file;
  ErrorCode code;
};

void expect_refused(const std::vector<Row>& rows) {
  for (const Row& row : rows) {
    const auto [code, threw] = test::thrown([&] { Archive{test::source(row.file)}; });
    EXPECT_TRUE(threw) << row.what;
    EXPECT_EQ(to_string(code), to_string(row.code)) << row.what;
  }
}

constexpr auto kCorrupt = ErrorCode::corrupt;
constexpr auto kUnsupported = ErrorCode::unsupported;
constexpr auto kIncomplete = ErrorCode::incomplete;

TEST(ZipHostile, TheBuilderMakesArchives) {
  const Archive archive(
      test::source(raw({with([](Made&) {}), {"a/data/0", "x"}, {"a/DATA/0", ""}})));
  EXPECT_EQ(archive.entries().size(), 3U);
  EXPECT_EQ(archive.find("a/data/0")->size, 1U);  // Z10
  EXPECT_EQ(archive.find("a/DATA/0")->size, 0U);
  EXPECT_EQ(archive.find("a/Data/0"), nullptr);
}

TEST(ZipHostile, Z01Z02EndRecords) {
  const Bytes good = raw({with([](Made&) {})});
  Bytes cut = good;
  cut.resize(cut.size() - 3);
  const auto size = static_cast<std::uint32_t>(good.size());
  expect_refused({
      {"no end record", raw({with([](Made&) {})}, {.comment = "", .has_end = false}), kIncomplete},
      {"an end record that is cut", cut, kIncomplete},
      {"nothing but an end record of something",
       [] {
         Bytes bytes;
         append(bytes, empty_end(100));
         return bytes;
       }(),
       kCorrupt},
      {"a second end record in the comment",
       raw({with([](Made&) {})}, {.comment = empty_end(size)}), kCorrupt},
      {"a second end record that ends before the comment does",
       raw({with([](Made&) {})}, {.comment = empty_end(size) + "xx"}), kCorrupt},
  });
}

TEST(ZipHostile, Z06Places) {
  const auto two = [](std::uint32_t offset) {
    return raw({{"a/data.pkl", "pickle"}, with([&](Made& made) {
                  made.name = "a/data/0";
                  made.offset = offset;
                })});
  };
  // One local header and its data for two names: the overlap of a zip bomb.
  Made twin = with([](Made& made) { made.offset = 0; });
  expect_refused({
      {"inside of another entry", two(20), kCorrupt},
      {"inside of the directory", two(100), kCorrupt},
      {"outside of the file", two(5000), kCorrupt},
      {"the place of another entry", two(0), kCorrupt},
      {"two names for one place", raw({with([](Made&) {}), twin}), kCorrupt},
      {"a size that reaches into the next entry",
       raw({with([](Made& made) { made.size = 20; }), {"a/data/0", "x"}}), kCorrupt},
      {"a size that leaves a hole",
       raw({with([](Made& made) { made.size = 2; }), {"a/data/0", "x"}}), kCorrupt},
  });
}

TEST(ZipHostile, Z07Numbers64) {
  const auto wide = [](const std::string& extra) {
    return raw({with([&](Made& made) {
      made.size = kIn64;
      made.extra = extra;
    })});
  };
  const std::uint64_t most = ~std::uint64_t{0};
  expect_refused({
      {"no field", wide(""), kCorrupt},
      {"a short field", wide(field64({6})), kCorrupt},
      {"a field that leaves the record", wide(field64({6, 6}).substr(0, 12)), kCorrupt},
      {"two sizes", wide(field64({6, 7})), kCorrupt},
      {"all bits", wide(field64({most, most})), kCorrupt},
      {"2^63", wide(field64({most / 2 + 1, most / 2 + 1})), kCorrupt},
      {"an offset of 2^63", raw({with([&](Made& made) {
         made.offset = kIn64;
         made.extra = field64({most / 2 + 1});
       })}),
       kCorrupt},
      {"another disk", raw({with([](Made& made) { made.disk = 1; })}), kUnsupported},
  });
}

TEST(ZipHostile, Z08Counts) {
  const Made one = with([](Made&) {});
  expect_refused({
      {"an entry more", raw({one}, {.count = 2, .comment = ""}), kCorrupt},
      {"an entry less", raw({one, {"a/b", ""}}, {.count = 1, .comment = ""}), kCorrupt},
      {"a byte more", raw({one}, {.directory_size = 57, .comment = ""}), kCorrupt},
      {"a byte less", raw({one}, {.directory_size = 55, .comment = ""}), kCorrupt},
      {"all bits", raw({one}, {.directory_size = kIn64, .comment = ""}), kCorrupt},
  });
}

TEST(ZipHostile, Z09Z12Z16FlagsMethodsAndNames) {
  std::vector<Row> rows = {
      {"a name twice", raw({with([](Made&) {}), with([](Made&) {})}), kCorrupt},
      {"a name only in the directory",
       raw({with([](Made& made) { made.local_name = "a/data.pkx"; })}), kCorrupt},
      {"a descriptor that is not there", raw({with([](Made& made) { made.flags = 1U << 3; })}),
       kCorrupt},
  };
  for (const int bit : {0, 1, 2, 4, 5, 6, 13}) {
    rows.push_back(
        {"flags",
         raw({with([&](Made& made) { made.flags = static_cast<std::uint16_t>(1U << bit); })}),
         kUnsupported});
  }
  // Z14, Z15: what is compressed is refused before anything of it is read.
  for (const int method : {1, 8, 9, 12, 14, 93, 99, 0x7B}) {
    rows.push_back(
        {"method",
         raw({with([&](Made& made) { made.method = static_cast<std::uint16_t>(method); })}),
         kUnsupported});
  }
  expect_refused(rows);
}

// Z20: padding is PyTorch's own affair; any place and any field of another program will do.
TEST(ZipHostile, Z20PlacesAndFieldsOfOthers) {
  for (const std::string extra : {"", "x", "FB", "FB\xff\xff", "FB\2Zzz"}) {
    const Archive archive(test::source(raw({with([&](Made& made) { made.local_extra = extra; })})));
    const Entry& entry = archive.entries().at(0);
    EXPECT_EQ(entry.data_offset, 40 + extra.size());
    EXPECT_EQ(archive.read(entry, 100).size(), 6U);
  }
}

// Zeros without end, of which only the last bytes say something.
class Sparse final : public ByteSource {
 public:
  Sparse(std::uint64_t size, Bytes end) : size_(size), end_(std::move(end)) {}
  [[nodiscard]] std::uint64_t size() const override { return size_; }
  void read_at(std::uint64_t offset, MutableByteView out) const override {
    if (out.size() > size_ || offset > size_ - out.size()) throw std::logic_error("out of range");
    most = std::max<std::uint64_t>(most, out.size());
    for (std::size_t i = 0; i < out.size(); ++i) {
      const std::uint64_t left = size_ - offset - i;
      out[i] = left <= end_.size() ? end_[end_.size() - left] : std::byte{0};
    }
  }
  [[nodiscard]] const std::string& name() const override { return name_; }
  mutable std::uint64_t most = 0;

 private:
  std::uint64_t size_;
  Bytes end_;
  std::string name_ = "sparse";
};

TEST(ZipHostile, Z22EightExbibytes) {
  const std::uint64_t size = ~std::uint64_t{0} >> 1;
  const auto code = [&](const Bytes& end) {
    const auto source = std::make_shared<Sparse>(size, end);
    const auto [found, threw] = test::thrown([&] { Archive{source}; });
    EXPECT_TRUE(threw);
    EXPECT_LT(source->most, 1U << 20);
    return found;
  };
  EXPECT_EQ(code({}), kIncomplete);
  EXPECT_EQ(code(raw({with([](Made&) {})})), kCorrupt);
  // A directory of almost all of it.
  Bytes end;
  append_le(end, kEnd64);
  append_le<std::uint64_t>(end, 44);
  append_le<std::uint32_t>(end, 0);
  append_le<std::uint64_t>(end, 0);
  append_le<std::uint64_t>(end, 1000);
  append_le<std::uint64_t>(end, 1000);
  append_le(end, size - 98);
  append_le<std::uint64_t>(end, 0);
  append_le(end, kEnd64Locator);
  append_le<std::uint32_t>(end, 0);
  append_le(end, size - 98);
  append_le<std::uint32_t>(end, 1);
  append_le(end, kEnd);
  append_le<std::uint32_t>(end, 0);
  append_le<std::uint32_t>(end, 0xFFFFFFFF);
  append_le<std::uint32_t>(end, kIn64);
  append_le<std::uint32_t>(end, kIn64);
  append_le<std::uint16_t>(end, 0);
  EXPECT_EQ(code(end), ErrorCode::limit);
}

}  // namespace
}  // namespace tessera::zip
