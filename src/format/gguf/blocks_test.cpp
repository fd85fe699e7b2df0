#include "format/gguf/blocks.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "format/gguf/testing.h"
#include "format/test_support.h"

namespace tessera::gguf {
namespace {

std::vector<float> decoded(const char* name, const std::vector<std::byte>& blocks) {
  const ElementType& type = *type_named(name);
  std::vector<float> values(blocks.size() / static_cast<std::size_t>(type.bytes) * 32);
  decode(type, blocks, values);
  return values;
}

constexpr std::uint16_t kHalfOne = 0x3C00, kHalfTwo = 0x4000, kHalfNan = 0x7E00;

// The worked examples of docs/formats/gguf.md.
TEST(GgufBlocks, KnownValues) {
  const auto q8 = decoded("Q8_0", test::Bytes().add(kHalfTwo).raw("\x01\xff\x7f\x80").zeros(28));
  EXPECT_EQ(std::vector<float>(q8.begin(), q8.begin() + 5),
            (std::vector<float>{2, -2, 254, -256, 0}));
  const auto q4 = decoded("Q4_0", test::Bytes().add(kHalfTwo).raw("\x92\xf0").zeros(14));
  EXPECT_EQ(q4[0], 2 * (2 - 8));
  EXPECT_EQ(q4[16], 2 * (9 - 8));
  EXPECT_EQ(q4[1], 2 * (0 - 8));
  EXPECT_EQ(q4[17], 2 * (15 - 8));
  const auto q41 = decoded("Q4_1", test::Bytes().add(kHalfTwo).add(kHalfOne).raw("\x92").zeros(15));
  EXPECT_EQ(q41[0], 2 * 2 + 1);
  EXPECT_EQ(q41[16], 2 * 9 + 1);
  EXPECT_EQ(q41[31], 1);
  EXPECT_TRUE(std::isnan(decoded("Q8_0", test::Bytes().add(kHalfNan).zeros(32))[0]));
}

TEST(GgufBlocks, RefusesOtherSizesAndTypes) {
  std::vector<float> values(32);
  const auto code = [&](const char* name, std::size_t bytes) {
    return tessera::test::thrown(
        [&] { decode(*type_named(name), std::vector<std::byte>(bytes), values); });
  };
  const std::pair refused(ErrorCode::invalid_argument, true);
  EXPECT_EQ(code("Q8_0", 33), refused);
  EXPECT_EQ(code("Q8_0", 68), refused);
  EXPECT_EQ(code("Q4_K", 144), refused);
  EXPECT_FALSE(code("Q8_0", 34).second);
}

TEST(GgufBlocks, TypesByNumberAndName) {
  EXPECT_EQ(type_of(8).name, "Q8_0");
  EXPECT_EQ(type_of(30).dtype, DType::bfloat16);
  EXPECT_EQ(type_named("Q9_9"), nullptr);
  for (const std::uint32_t gone : {4U, 5U, 31U, 36U, 1000U, ~0U}) {
    EXPECT_EQ(tessera::test::thrown([&] { (void)type_of(gone); }),
              std::pair(ErrorCode::unsupported, true))
        << gone;
  }
}

}  // namespace
}  // namespace tessera::gguf
