#include "base/name_number.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <random>
#include <string>

namespace tessera {
namespace {

TEST(NameNumber, IsPlain) {
  EXPECT_EQ(plain_number("0"), 0);
  EXPECT_EQ(plain_number("1048575"), 1048575);
  for (const char* text : {"", "00", "01", "-1", "+1", " 1", "1 ", "1x", "x", "0x1", "1048576",
                           "2147483647", "2147483648", "99999999999999999999", "1.0", "\xd9\xa1"})
    EXPECT_EQ(plain_number(text), std::nullopt) << text;
  EXPECT_EQ(plain_number(std::string_view("1\0", 2)), std::nullopt);
}

// What is taken is what a program writes for that number, and nothing else is.
TEST(NameNumber, IsWhatProgramsWrite) {
  std::mt19937 random(7);
  constexpr std::string_view kCharacters = "0123456789-+ x";
  for (int i = 0; i < 20000; ++i) {
    std::string text;
    for (std::size_t n = random() % 9; n > 0; --n) text += kCharacters[random() % 14];
    int value = -1;
    const bool is_number = std::sscanf(text.c_str(), "%d", &value) == 1 && value >= 0 &&
                           value < (1 << 20) && std::to_string(value) == text;
    EXPECT_EQ(plain_number(text), is_number ? std::optional(value) : std::nullopt) << text;
  }
}

TEST(NameNumber, MayHaveZerosInFront) {
  EXPECT_EQ(padded_number("00007"), 7);
  EXPECT_EQ(padded_number("999999"), 999999);
  for (const char* text : {"", "-0001", "+0001", "    1", "0000001", "1-of-"})
    EXPECT_EQ(padded_number(text), std::nullopt) << text;
}

TEST(NameNumber, StandsBetween) {
  EXPECT_EQ(number_between("rank", "rank12.pt", ".pt"), 12);
  EXPECT_EQ(number_between("", "12", ""), 12);
  for (const char* name : {"rank.pt", "rankx.pt", "rank00.pt", "rank1.pt.tmp", "rank1.pth", ".pt",
                           "rank", "rank99999999999999999999.pt", "model/rank1.pt"})
    EXPECT_EQ(number_between("rank", name, ".pt"), std::nullopt) << name;
  EXPECT_EQ(number_between("aba", "aba", "a"), std::nullopt);
}

}  // namespace
}  // namespace tessera
