#include "base/expression.h"

#include <fnmatch.h>
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

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

TEST(Glob, CountsCharacters) {
  EXPECT_TRUE(Glob("?.x").fits("\u00e9.x"));
  EXPECT_TRUE(Glob("[\u00e9-\u00fc].x").fits("\u00f6.x"));
  EXPECT_FALSE(Glob("?.x").fits("ab.x"));
  EXPECT_TRUE(Glob("a*b").fits("a\nb"));
  EXPECT_TRUE(Glob("[[:digit:]]").fits("7"));
  // In what is no UTF-8 a byte is one.
  EXPECT_TRUE(Glob("?.x").fits("\xe9.x"));
  EXPECT_TRUE(Glob("\xe9*").fits("\xe9.x"));
  EXPECT_FALSE(Glob("??.x").fits("\xe9.x"));
}

// ASCII alone: where characters are UTF-8's, glibc's takes bytes too (tests/cli/selections_test.py
// has those). And without
// "[." and "[=", which are collating symbols.
TEST(Glob, GeneratedOnesFitWhatFnmatchFits) {
  const std::vector<std::string> of_globs{
      "a",    "b",  "0",     "[",     "]",    "!",    "^",     "-",           "*",      "?",
      "\\",   "'",  "\"",    "\n",    "[ab]", "[!a]", "[a-c]", "[^b]",        "[]",     "[!]",
      "[]a]", "[]", "[\\]]", "[b-a]", "[a-]", "\\[",  "\\*",   "[[:digit:]]", "[!'\"]", "_"};
  const std::vector<std::string> of_names{"a", "b",  "0", "[",  "]",  "!", "^", "-",
                                          "*", "\\", "'", "\"", "\n", "_", "c"};
  std::mt19937 random(50);
  const auto made_of = [&](const std::vector<std::string>& pieces, int most) {
    std::string text;
    for (int left = static_cast<int>(random() % static_cast<unsigned>(most)) + 1; left > 0; --left)
      text += pieces[random() % pieces.size()];
    return text;
  };
  int fitting = 0;
  for (int round = 0; round < 500; ++round) {
    const std::string glob = made_of(of_globs, 4);
    const Glob compiled(glob);
    for (int i = 0; i < 200; ++i) {
      const std::string name = made_of(of_names, 4);
      const bool expected = ::fnmatch(glob.c_str(), name.c_str(), 0) == 0;
      ASSERT_EQ(compiled.fits(name), expected) << "glob <" << glob << "> name <" << name << ">";
      if (expected) ++fitting;
    }
  }
  EXPECT_GT(fitting, 1000);
}

}  // namespace
}  // namespace tessera
