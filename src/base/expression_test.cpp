#include "base/expression.h"

#include <gtest/gtest.h>

#include "tessera/error.h"

namespace tessera {
namespace {

std::string replaced(const std::string& text, const std::string& expression,
                     const std::string& to) {
  const Expression made(expression);
  return made.replaced(text, made.replacement_of(to));
}

// The refusal of an expression, and of what is to take its matches' place.
std::string refusal(const std::string& expression, const std::string& to = "") {
  try {
    (void)Expression(expression).replacement_of(to);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    return error.message();
  }
  return "";
}

TEST(Expression, MatchesTheWholeText) {
  const Expression blocks("(.*\\.)?blocks\\.[0-9]+");
  EXPECT_TRUE(blocks.matches("blocks.0"));
  EXPECT_TRUE(blocks.matches("a.b.blocks.12"));
  EXPECT_FALSE(blocks.matches("blocks.0.w"));
  EXPECT_FALSE(blocks.matches("xblocks.0"));
  EXPECT_FALSE(blocks.matches(""));
}

TEST(Expression, GroupsHaveBothSpellings) {
  EXPECT_EQ(replaced("a.b", "(\\w)\\.(\\w)", "$2-\\1"), "b-a");
  EXPECT_EQ(replaced("ab", "b", "[$&|$0|\\0]"), "a[b|b|b]");
  EXPECT_EQ(replaced("ab", "b", "$$1\\\\1"), "a$1\\1");
  EXPECT_EQ(replaced("ab", "a(x)?b", "<\\1>"), "<>");  // a group that took no part
  // Two digits where there are so many groups.
  EXPECT_EQ(replaced("abcdefghijk", "(a)(b)(c)(d)(e)(f)(g)(h)(i)(j)(k)", "$11$1\\10"), "kaj");
  EXPECT_EQ(replaced("ab", "(a)", "$11"), "a1b");
}

TEST(Expression, EveryMatchIsReplacedEmptyOnesToo) {
  EXPECT_EQ(replaced("net1.net2", "net(\\d)", "block.$1"), "block.1.block.2");
  EXPECT_EQ(replaced("model.model.w", "^model\\.", ""), "model.w");
  EXPECT_EQ(replaced("abab", "^ab|b", "x"), "xax");
  EXPECT_EQ(replaced("baac", "a*", "-"), "-b--c-");  // as in ECMAScript and Python
  EXPECT_EQ(replaced("", "^", "app."), "app.");
  EXPECT_EQ(replaced("a\xc3\xa9", "", "-"), "-a-\xc3\xa9-");  // not inside of a letter
  EXPECT_EQ(replaced("\xc3\xa9x", "^.", ""), "x");
  EXPECT_EQ(replaced("\xff\xfe.w", "\\.w$", ".v"), "\xff\xfe.v");  // what is no UTF-8 stays
}

TEST(Expression, WhatTheEngineLacksIsSaid) {
  for (const char* lacking : {"a(?=b)", "a(?!b)", "(?<=a)b", "(?<!a)b", "(a)\\1"}) {
    EXPECT_NE(refusal(lacking).find("no looking ahead or behind and no back-references"),
              std::string::npos)
        << refusal(lacking);
  }
  for (const char* wrong : {"(", "a)", "[a", "*", "a{2000}", "\xff", "a\\"})
    EXPECT_NE(refusal(wrong).find("is no regular expression"), std::string::npos) << wrong;
}

TEST(Expression, AGroupThatTheExpressionLacksIsRefused) {
  EXPECT_NE(refusal("(a)", "\\2").find("has group 2, the expression '(a)' has 1"),
            std::string::npos);
  EXPECT_NE(refusal("a", "$1"), "");
  EXPECT_NE(refusal("a", "x\\n").find("write '\\\\' for the character itself"), std::string::npos);
  for (const char* open : {"$", "\\", "$x", "$`", "$'"}) EXPECT_NE(refusal("a", open), "") << open;
  EXPECT_EQ(refusal("(a)", "\\0$1$$"), "");
}

// Engines that try again need 2^N steps, or N to the power of the loops.
TEST(Expression, NoTextTakesForEver) {
  const std::string many(4000, 'a');
  EXPECT_EQ(replaced(many + "!", "(a+)+$", "b"), many + "!");
  EXPECT_EQ(replaced(many + "!", "(a|a)*$", "b"), many + "!b");
  EXPECT_FALSE(Expression("(.*a){12}b").matches(many));
  EXPECT_FALSE(Expression("((a*)*)*b").matches(many));
}

}  // namespace
}  // namespace tessera
