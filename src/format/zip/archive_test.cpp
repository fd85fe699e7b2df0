#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>

#include "base/crc32.h"
#include "base/numbers.h"
#include "format/test_support.h"
#include "format/zip/zip.h"

namespace tessera::zip {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

// An archive as our writer makes it.
std::vector<std::byte> archive(const std::vector<std::pair<std::string, std::string>>& records) {
  Writer writer;
  std::vector<std::byte> file;
  for (const auto& [name, data] : records) {
    const std::size_t index = writer.count();
    writer.add(name, data.size());
    const std::vector<std::byte> header = writer.header(index);
    const auto* bytes = reinterpret_cast<const std::byte*>(data.data());
    file.insert(file.end(), header.begin(), header.end());
    file.insert(file.end(), bytes, bytes + data.size());
    const auto descriptor = writer.descriptor(index, crc32({bytes, data.size()}));
    file.insert(file.end(), descriptor.begin(), descriptor.end());
  }
  const auto tail = writer.tail();
  file.insert(file.end(), tail.begin(), tail.end());
  return file;
}

ErrorCode code_of(const std::vector<std::byte>& file) {
  const auto [code, threw] = test::thrown([&] { Archive{test::source(file)}; });
  EXPECT_TRUE(threw);
  return code;
}

// Offset of the `nth` occurrence of a 4-byte signature.
std::size_t position(const std::vector<std::byte>& file, const char* signature, int nth = 0) {
  for (std::size_t i = 0; i + 4 <= file.size(); ++i) {
    if (std::memcmp(file.data() + i, signature, 4) == 0 && nth-- == 0) return i;
  }
  throw Error(ErrorCode::not_found, "no such signature");
}

TEST(ZipArchive, ListsAndReadsAPyTorchArchive) {
  const Archive archive(test::source(test::golden("a.b.c.pt")));
  std::vector<std::string> names;
  for (const Entry& entry : archive.entries()) {
    names.push_back(entry.name);
    EXPECT_EQ(entry.data_offset % 64, 0U);
  }
  EXPECT_THAT(names,
              ElementsAre("a.b.c/data.pkl", "a.b.c/.format_version", "a.b.c/.storage_alignment",
                          "a.b.c/byteorder", "a.b.c/version", "a.b.c/.data/serialization_id"));
  const std::vector<std::byte> order = archive.read(*archive.find("a.b.c/byteorder"), 100);
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(order.data()), order.size()), "little");
  EXPECT_EQ(archive.find("A.B.C/byteorder"), nullptr);
}

// One read for a file of 4 KiB, two for a DCP item of any size.
TEST(ZipArchive, ReadsHeadersTogether) {
  const auto small = std::make_shared<test::CountingSource>(test::source(test::golden("item.pt")));
  const Archive first(small);
  EXPECT_EQ(small->reads, 1U);
  const auto item = std::make_shared<test::CountingSource>(
      test::source(archive({{"a/data.pkl", std::string(400, 'x')},
                            {"a/.format_version", "1"},
                            {"a/byteorder", "little"},
                            {"a/data/0", std::string(1 << 20, 'y')},
                            {"a/version", "3\n"}})));
  const Archive second(item);
  EXPECT_EQ(second.read(*second.find("a/data.pkl"), 1000).size(), 400U);
  EXPECT_EQ(item->reads, 2U);
  EXPECT_LT(item->bytes, 6000U);
}

TEST(ZipArchive, ManyEntries) {
  std::vector<std::pair<std::string, std::string>> records;
  for (int i = 0; i < 70'000; ++i)
    records.emplace_back("r/" + std::to_string(i), i % 3 == 0 ? "" : "data");
  const Archive many(test::source(archive(records)));
  ASSERT_EQ(many.entries().size(), records.size());
  EXPECT_EQ(many.find("r/69999")->size, 0U);
  EXPECT_EQ(many.read(*many.find("r/69998"), 10).size(), 4U);
}

TEST(ZipArchive, Empty) {
  EXPECT_TRUE(Archive(test::source(archive({}))).entries().empty());
}

TEST(ZipArchive, ChecksData) {
  std::vector<std::byte> file = archive({{"a/b", "hello"}, {"a/empty", ""}});
  const Archive good(test::source(file));
  EXPECT_EQ(test::thrown([&] { (void)good.read(good.entries()[0], 4); }).first, ErrorCode::limit);
  EXPECT_TRUE(good.read(good.entries()[1], 0).empty());
  file[64] = std::byte{'j'};
  const Archive bad(test::source(file));
  EXPECT_EQ(test::thrown([&] { (void)bad.read(bad.entries()[0], 10); }).first, ErrorCode::corrupt);
}

// torch.serialization.set_crc32_options(False) records 0 everywhere.
TEST(ZipArchive, ZeroCrcIsNotComputed) {
  Writer writer;
  writer.add("a/b", 3);
  std::vector<std::byte> file = writer.header(0);
  for (const char c : std::string("abc")) file.push_back(static_cast<std::byte>(c));
  for (const auto& part : {writer.descriptor(0, 0), writer.tail()})
    file.insert(file.end(), part.begin(), part.end());
  const Archive archive(test::source(file));
  EXPECT_EQ(archive.read(archive.entries()[0], 3).size(), 3U);
}

// Hostile rows Z01-Z12, Z16, Z22: one change each to an archive of two entries.
TEST(ZipArchive, RefusesDamage) {
  const std::vector<std::byte> good = archive({{"a/data.pkl", "pickle"}, {"a/data/0", "storage"}});
  const std::size_t end = good.size() - 22;
  const std::size_t end64 = position(good, "PK\6\6");
  const std::size_t central = position(good, "PK\1\2");
  const std::size_t second = position(good, "PK\3\4", 1);
  const std::size_t descriptor = position(good, "PK\7\10");
  struct Case {
    const char* what;
    std::size_t offset;
    int value;
    ErrorCode code;
  };
  const std::vector<Case> cases = {
      {"end record's signature", end, 0, ErrorCode::incomplete},
      {"comment length", end + 20, 1, ErrorCode::incomplete},
      {"disk number", end + 4, 1, ErrorCode::unsupported},
      {"entry count", end + 10, 3, ErrorCode::unsupported},
      {"directory size", end64 + 40, 1, ErrorCode::corrupt},
      {"directory offset", end64 + 48, 1, ErrorCode::corrupt},
      {"directory offset of 2^63", end64 + 55, 0x80, ErrorCode::corrupt},
      {"locator", end - 20 + 8 + 5, 0xFF, ErrorCode::corrupt},
      {"locator's disk count", end - 20 + 16, 2, ErrorCode::unsupported},
      {"encrypted", central + 8, 9, ErrorCode::unsupported},
      {"masked header", central + 9, 0x28, ErrorCode::unsupported},
      {"deflated", central + 10, 8, ErrorCode::unsupported},
      {"crc", central + 16, 0, ErrorCode::corrupt},
      {"stored size", central + 20, 1, ErrorCode::corrupt},
      {"name length", central + 28, 0, ErrorCode::corrupt},
      {"extra length", central + 31, 0xFF, ErrorCode::corrupt},
      {"header offset", central + 42, 1, ErrorCode::corrupt},
      {"header offset outside", central + 44, 0x7F, ErrorCode::corrupt},
      {"name in the directory", central + 46, 'b', ErrorCode::corrupt},
      {"local signature", 0, 'Q', ErrorCode::corrupt},
      {"local flags", 6, 0, ErrorCode::corrupt},
      {"local method", 8, 8, ErrorCode::corrupt},
      {"local crc", 14, 1, ErrorCode::corrupt},
      {"local size", 22, 9, ErrorCode::corrupt},
      {"local name", 30, 'b', ErrorCode::corrupt},
      {"local extra length", second + 28, 0, ErrorCode::corrupt},
      {"descriptor's signature", descriptor, 0, ErrorCode::corrupt},
      {"descriptor's crc", descriptor + 4, 0, ErrorCode::corrupt},
      {"descriptor's size", descriptor + 8, 1, ErrorCode::corrupt},
  };
  for (const Case& c : cases) {
    std::vector<std::byte> file = good;
    ASSERT_NE(file[c.offset], static_cast<std::byte>(c.value)) << c.what;
    file[c.offset] = static_cast<std::byte>(c.value);
    EXPECT_EQ(code_of(file), c.code) << c.what;
  }
}

TEST(ZipArchive, RefusesWrongShapes) {
  const std::vector<std::byte> good = archive({{"a/b", "12"}, {"a/c", "34"}});
  EXPECT_EQ(code_of(archive({{"a/b", "1"}, {"a/b", "1"}})), ErrorCode::corrupt);  // Z09
  std::vector<std::byte> after = good;
  after.push_back(std::byte{0});
  EXPECT_EQ(code_of(after), ErrorCode::corrupt);  // Z03
  std::vector<std::byte> before = good;
  before.insert(before.begin(), std::byte{0});
  EXPECT_EQ(code_of(before), ErrorCode::corrupt);  // Z04
  std::vector<std::byte> comment = good;
  comment[comment.size() - 2] = std::byte{2};
  comment.resize(comment.size() + 2);
  EXPECT_EQ(code_of(comment), ErrorCode::unsupported);
  // Z08: a directory that says 2^32 entries.
  std::vector<std::byte> count = good;
  const std::size_t end64 = position(good, "PK\6\6");
  count[end64 + 24 + 4] = count[end64 + 32 + 4] = std::byte{1};
  count[count.size() - 22 + 8] = count[count.size() - 22 + 9] = std::byte{0xFF};
  count[count.size() - 22 + 10] = count[count.size() - 22 + 11] = std::byte{0xFF};
  EXPECT_EQ(code_of(count), ErrorCode::limit);
}

TEST(ZipArchive, SurvivesDamage) {
  const auto parse = [](std::vector<std::byte> bytes) {
    const Archive archive(test::source(std::move(bytes)));
    for (const Entry& entry : archive.entries()) (void)archive.read(entry, 1 << 20);
  };
  EXPECT_THAT(test::damage(test::golden("item.pt"), 3000, parse), IsEmpty());
}

}  // namespace
}  // namespace tessera::zip
