// Endianness, CRC-32 and digests: bytes in, numbers out.
#include <gtest/gtest.h>

#include <random>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/crc32.h"
#include "base/digest.h"
#include "base/numbers.h"
#include "base/sha.h"
#include "tessera/error.h"

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

TEST(Crc32, IsPutTogetherFromTermsOfPartsInAnyOrder) {
  const std::string text = "the quick brown fox jumps over the lazy dog";
  for (const std::size_t cut : {0U, 1U, 9U, 43U}) {
    const std::string_view parts[] = {std::string_view(text).substr(cut),
                                      std::string_view(text).substr(0, cut)};
    std::uint32_t terms = 0;
    std::size_t behind = 0;
    for (const std::string_view part : parts) {
      terms ^= crc32_term(crc32(std::as_bytes(std::span(part))), part.size(), behind);
      behind += part.size();
    }
    EXPECT_EQ(crc32_of_terms(terms, text.size()), crc32(bytes_of(text)));
  }
  EXPECT_EQ(crc32_of_terms(0, 0), 0U);
}

// From the reference implementation: XXH3_64bits of nothing and of "a".
// A bit at a time, as the definition says.
std::uint32_t slow_crc32(std::span<const std::byte> bytes) {
  std::uint32_t value = 0xFFFFFFFF;
  for (const std::byte byte : bytes) {
    value ^= std::to_integer<std::uint32_t>(byte);
    for (int bit = 0; bit < 8; ++bit) value = value >> 1U ^ ((value & 1U) != 0 ? 0xEDB88320U : 0U);
  }
  return ~value;
}

// Long rows are folded where the processor can do that, by blocks of 256 bytes.
TEST(Crc32, IsThatOfTheDefinitionForEveryLengthAndAddress) {
  std::vector<std::byte> bytes(5000);
  std::minstd_rand random(1);
  for (std::byte& byte : bytes) byte = std::byte(random() >> 8U);
  const std::span<const std::byte> all(bytes);
  for (std::size_t size = 0; size < 2900; size += 1 + size / 40) {
    for (const std::size_t at : {std::size_t{0}, std::size_t{1}, size % 64, std::size_t{2049}}) {
      const auto part = all.subspan(at, size);
      ASSERT_EQ(crc32(part), slow_crc32(part)) << size << " bytes at " << at;
      const std::uint32_t before = crc32(all.first(at));
      ASSERT_EQ(crc32(part, before), slow_crc32(all.first(at + size))) << size << " at " << at;
    }
  }
}

TEST(Digest, KnownValues) {
  EXPECT_EQ(digest_text(digest64({})), "2d06800538d394c2");
  EXPECT_EQ(digest_text(digest64(bytes_of("a"))), "e6c632b61e964e1f");
  EXPECT_NE(digest64(bytes_of("b")), digest64(bytes_of("a")));
}

TEST(Digest, PartsGiveTheDigestOfTheWhole) {
  const std::string text(1000, 'x');
  for (const std::size_t cut : {0, 1, 255, 256, 999, 1000}) {
    RunningDigest digest;
    digest.add(bytes_of(text.substr(0, cut)));
    digest.add(bytes_of(text.substr(cut)));
    EXPECT_EQ(digest.value(), digest64(bytes_of(text)));
  }
}

TEST(Digest, TextThereAndBack) {
  for (const std::uint64_t digest : {std::uint64_t{0}, std::uint64_t{0xfedcba9876543210}}) {
    EXPECT_EQ(digest_of_text(digest_text(digest)), digest);
  }
  for (const char* bad :
       {"", "2d06800538d394c", "2D06800538d394c2", "-d06800538d394c2", "2d06800538d394c21"}) {
    EXPECT_THROW((void)digest_of_text(bad), Error) << bad;
  }
}

// Around the lengths at which another block begins; the digits are those of Python's hashlib.
TEST(Sha256, IsThatOfOthers) {
  const auto of = [](std::size_t count) { return sha256_text(std::string(count, 'a')); };
  EXPECT_EQ(of(0), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(sha256_text("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(of(55), "9f4390f8d30c2dd92ec9f095b65e2b9ae9b0a925a5258e241c9f1e910f734318");
  EXPECT_EQ(of(56), "b35439a4ac6f0948b6d6f9e3c6af0f5f590ce20f1bde7090ef7970686ec6738a");
  EXPECT_EQ(of(64), "ffe054fe7ae0cb6dc65c3af9b61d5209f439851db43d0ba5997337df154668eb");
  EXPECT_EQ(of(119), "31eba51c313a5c08226adf18d4a359cfdfd8d2e816b13f4af952f7ea6584dcfb");
  EXPECT_EQ(of(1000), "41edece42d63e8d9bf515a9ba6932e1c20cbc9f5a5d134645adb5db1b9737ea3");
}

std::string sha_of_parts(Sha kind, const std::string& text, std::size_t part) {
  RunningSha sha(kind);
  for (std::size_t at = 0; at < text.size(); at += part) sha.add(bytes_of(text.substr(at, part)));
  return sha.text();
}

TEST(Sha1, IsThatOfOthers) {
  const auto of = [](std::size_t count) {
    return sha_of_parts(Sha::sha1, std::string(count, 'a'), 1000);
  };
  EXPECT_EQ(of(0), "da39a3ee5e6b4b0d3255bfef95601890afd80709");
  EXPECT_EQ(sha_of_parts(Sha::sha1, "abc", 3), "a9993e364706816aba3e25717850c26c9cd0d89d");
  EXPECT_EQ(of(55), "c1c8bbdc22796e28c0e15163d20899b65621d65a");
  EXPECT_EQ(of(64), "0098ba824b5c16427bd7a1122a5a442a25ec644d");
  EXPECT_EQ(of(1000), "291e9a6c66994949b57ba5e650361e98fc36b1ba");
}

TEST(RunningSha, PartsGiveTheDigestOfTheWhole) {
  const std::string text(1000, 'x');
  for (const Sha kind : {Sha::sha1, Sha::sha256}) {
    for (const std::size_t part : {1, 63, 64, 65, 128, 999})
      EXPECT_EQ(sha_of_parts(kind, text, part), sha_of_parts(kind, text, 1000)) << part;
  }
}

}  // namespace
}  // namespace tessera
