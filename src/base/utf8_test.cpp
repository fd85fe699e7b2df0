#include "base/utf8.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

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
