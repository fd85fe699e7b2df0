#include "base/text.h"

#include <cstdio>
#include <random>
#include <string>

#include <gtest/gtest.h>

namespace tessera {
namespace {

const std::vector<std::string> kNames = {"model.head.weight", "model.head.bias", "step", "lr"};

TEST(Suggest, FindsTheNearestName) {
  EXPECT_EQ(nearest("model.haed.weight", kNames), "model.head.weight");
  EXPECT_EQ(nearest("model.head.bia", kNames), "model.head.bias");
  EXPECT_EQ(nearest("sstep", kNames), "step");
}

TEST(Suggest, NothingThatIsFar) {
  EXPECT_EQ(nearest("model", kNames), "");
  EXPECT_EQ(nearest("xy", kNames), "");
  EXPECT_EQ(nearest(std::string(300, 'x'), {std::string(300, 'x')}), "");
  EXPECT_EQ(nearest(std::string(256, 'x'), {std::string(255, 'x')}), std::string(255, 'x'));
}

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

TEST(Utf8, ShortestFormsOfEveryLength) {
  const auto same = [](std::string_view text, std::size_t length, std::uint32_t code) {
    const Rune rune = first_rune(text);
    std::string back;
    append_utf8(back, code);
    return rune.length == length && rune.code == code && text.starts_with(back);
  };
  EXPECT_TRUE(same("a", 1, 'a'));
  EXPECT_TRUE(same(std::string_view("\0", 1), 1, 0));
  EXPECT_TRUE(same("\xc2\x80 and more", 2, 0x80));
  EXPECT_TRUE(same("\xdf\xbf", 2, 0x7ff));
  EXPECT_TRUE(same("\xe0\xa0\x80", 3, 0x800));
  EXPECT_TRUE(same("\xed\xa0\x80", 3, 0xd800));  // a surrogate
  EXPECT_TRUE(same("\xef\xbf\xbf", 3, 0xffff));
  EXPECT_TRUE(same("\xf0\x90\x80\x80", 4, 0x10000));
  EXPECT_TRUE(same("\xf4\x8f\xbf\xbf", 4, 0x10ffff));
}

TEST(Utf8, WhatIsNone) {
  for (const std::string_view text :
       {"\x80", "\xbf", "\xc0\x80", "\xc1\xbf", "\xc2", "\xc2x", "\xe0\x9f\xbf", "\xe1\x80",
        "\xe1\x80x", "\xf0\x8f\xbf\xbf", "\xf4\x90\x80\x80", "\xf5\x80\x80\x80",
        "\xf8\x88\x80\x80\x80", "\xff\xff\xff\xff\xff"}) {
    EXPECT_EQ(first_rune(text).length, 0U) << text;
  }
}

TEST(Utf8, Surrogates) {
  EXPECT_FALSE(is_surrogate(0xd7ff));
  EXPECT_TRUE(is_surrogate(0xd800));
  EXPECT_TRUE(is_surrogate(0xdfff));
  EXPECT_FALSE(is_surrogate(0xe000));
}

}  // namespace
}  // namespace tessera
