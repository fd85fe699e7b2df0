// Endianness, CRC-32 and digests: bytes in, numbers out.
#include <gtest/gtest.h>

#include <string_view>

#include "base/crc32.h"
#include "base/digest.h"
#include "base/endian.h"

namespace tessera {
namespace {

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

TEST(Endian, TheLowByteComesFirst) {
  std::vector<std::byte> bytes;
  append_le(bytes, std::uint32_t{0x01020304});
  ASSERT_EQ(bytes.size(), 4U);
  EXPECT_EQ(bytes[0], std::byte{4});
  EXPECT_EQ(bytes[3], std::byte{1});
  EXPECT_EQ(load_le<std::uint32_t>(bytes.data()), 0x01020304U);
}

TEST(Endian, UnalignedPlacesAreFine) {
  std::byte bytes[11] = {};
  store_le(bytes + 3, std::uint64_t{0x1122334455667788});
  EXPECT_EQ(load_le<std::uint64_t>(bytes + 3), 0x1122334455667788U);
  EXPECT_EQ(load_le<std::uint16_t>(bytes + 3), 0x7788U);
}

// The check value of the CRC catalogue for CRC-32/ISO-HDLC.
TEST(Crc32, KnownValue) {
  EXPECT_EQ(crc32(bytes_of("123456789")), 0xCBF43926U);
  EXPECT_EQ(crc32({}), 0U);
}

TEST(Crc32, PiecesGiveTheValueOfTheWhole) {
  const std::string_view text = "the quick brown fox";
  const std::uint32_t whole = crc32(bytes_of(text));
  for (std::size_t cut = 0; cut <= text.size(); ++cut) {
    const std::uint32_t first = crc32(bytes_of(text.substr(0, cut)));
    const std::uint32_t second = crc32(bytes_of(text.substr(cut)));
    EXPECT_EQ(crc32(bytes_of(text.substr(cut)), first), whole);
    EXPECT_EQ(crc32_combine(first, second, text.size() - cut), whole);
  }
}

// From the reference implementation: XXH3_128bits of nothing and of "a", high word first.
TEST(Digest, KnownValues) {
  EXPECT_EQ(digest_hex({}), "99aa06d3014798d86001c324468d497f");
  EXPECT_EQ(digest_hex(bytes_of("a")), "a96faf705af16834e6c632b61e964e1f");
  EXPECT_NE(digest_hex(bytes_of("b")), digest_hex(bytes_of("a")));
}

}  // namespace
}  // namespace tessera
