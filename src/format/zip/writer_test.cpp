#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "base/crc32.h"
#include "base/numbers.h"
#include "format/test_support.h"
#include "format/zip/zip.h"

namespace tessera::zip {
namespace {

void put(std::vector<std::byte>& file, std::uint64_t offset, const std::vector<std::byte>& bytes) {
  file.resize(std::max<std::size_t>(file.size(), offset + bytes.size()));
  std::copy(bytes.begin(), bytes.end(), file.begin() + static_cast<std::ptrdiff_t>(offset));
}

std::vector<std::byte> rewrite(const Archive& archive) {
  Writer writer;
  std::vector<std::byte> file;
  for (const Entry& entry : archive.entries()) {
    const std::vector<std::byte> data = archive.read(entry, 1 << 20);
    const std::size_t index = writer.count();
    const Writer::Placed placed = writer.add(entry.name, data.size());
    put(file, placed.header_offset, writer.header(index));
    put(file, placed.data_offset, data);
    put(file, placed.descriptor_offset, writer.descriptor(index, crc32(data)));
  }
  EXPECT_EQ(writer.tail().size(), writer.tail_size());
  put(file, writer.tail_offset(), writer.tail());
  return file;
}

// F-01: the bytes of PyTorch's writer, for every file of it that we keep.
TEST(ZipWriter, RewritesPyTorchArchives) {
  for (const char* name : {"a.b.c.pt", "item.pt", "train.pt", "kinds.pt", "hand.pt", "g4_dt.pt",
                           "fsdp1_uop0_ws2/model.pt", "fsdp1_uop1_ws2/optim.pt"}) {
    const std::vector<std::byte> original = test::golden(name);
    EXPECT_EQ(rewrite(Archive(test::source(original))), original) << name;
  }
}

// F-01, zip64: sizes of 2^32 - 2, 2^32 - 1 and more, empty and small entries beyond 4 GiB.
TEST(ZipWriter, Zip64) {
  const std::vector<std::byte> text = test::golden("zip64.json");
  const auto* begin = reinterpret_cast<const char*>(text.data());
  const auto golden = nlohmann::json::parse(begin, begin + text.size());
  std::map<std::uint64_t, std::byte> expected;  // every byte that is not data, by offset
  for (const auto& write : golden["writes"]) {
    const std::uint64_t offset = write[0];
    const std::string hex = write[1];
    for (std::size_t i = 0; i < hex.size(); i += 2) {
      expected[offset + i / 2] = static_cast<std::byte>(std::stoi(hex.substr(i, 2), nullptr, 16));
    }
  }
  const auto matches = [&](std::uint64_t offset, const std::vector<std::byte>& bytes) {
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      const auto found = expected.find(offset + i);
      if (found == expected.end() || found->second != bytes[i]) return false;
    }
    return true;
  };
  Writer writer;
  for (const auto& record : golden["records"]) {
    const std::string name = record[0];
    const std::size_t index = writer.count();
    const Writer::Placed placed = writer.add("archive/" + name, record[1]);
    EXPECT_TRUE(matches(placed.header_offset, writer.header(index))) << name;
    EXPECT_EQ(placed.data_offset % 64, 0U) << name;
    std::uint32_t crc = 0;
    for (int i = 3; placed.size != 0 && i >= 0;
         --i) {  // the data's CRC is in the golden descriptor
      crc = crc << 8 | static_cast<std::uint32_t>(expected[placed.descriptor_offset + 4 + i]);
    }
    EXPECT_TRUE(matches(placed.descriptor_offset, writer.descriptor(index, crc))) << name;
  }
  EXPECT_TRUE(matches(writer.tail_offset(), writer.tail()));
  EXPECT_EQ(writer.tail_offset() + writer.tail_size(), golden["size"].get<std::uint64_t>());
}

TEST(ZipWriter, AlignsToOtherPowers) {
  Writer writer(4096);
  EXPECT_EQ(writer.add("a/b", 5).data_offset, 4096U);
  EXPECT_EQ(writer.add("a/c", 5).data_offset, 8192U);
}

TEST(ZipWriter, RefusesWhatHeadersCannotSay) {
  EXPECT_THROW(Writer(1 << 16), Error);
  Writer writer;
  EXPECT_THROW(writer.add("", 1), Error);
  EXPECT_THROW(writer.add(std::string(1 << 16, 'x'), 1), Error);
  EXPECT_THROW(writer.add("x", ~std::uint64_t{0}), Error);
}

}  // namespace
}  // namespace tessera::zip
