#include "value/render.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <set>
#include <string>

namespace tessera {
namespace {

TEST(Render, LooksLikePython) {
  EXPECT_EQ(render(Value::dict(
                {{"a", Value::list({1, 2.5, Value()})}, {Value(3), Value::tuple({true})}})),
            "{'a': [1, 2.5, None], 3: (True,)}");
  EXPECT_EQ(render(Value::object({.callable = Value::global("torch", "Size"),
                                  .arguments = Value::tuple({Value::tuple({2, 3})})})),
            "torch.Size([2, 3])");
  EXPECT_EQ(render(Value::bytes({std::byte{'a'}, std::byte{0}})), "b'a\\x00'");
  EXPECT_EQ(render(Value::complex({0, -1})), "-1j");
  EXPECT_EQ(render(Value::complex({-0.0, 1.5})), "(-0+1.5j)");
  EXPECT_EQ(render(Value::complex({1, std::nan("")})), "(1+nanj)");
  EXPECT_EQ(render(Value::complex({1e16, -0.0})), "(1e+16-0j)");
}

TEST(Render, RealsAsPythonWritesThem) {
  EXPECT_EQ(render_real(1), "1.0");
  EXPECT_EQ(render_real(0.1), "0.1");
  EXPECT_EQ(render_real(1e-5), "1e-05");
  EXPECT_EQ(render_real(1e16), "1e+16");
  EXPECT_EQ(render_real(123456789012345.0), "123456789012345.0");
  EXPECT_EQ(render_real(-1.0 / 0.0), "-inf");
}

// Goal G32: no control byte of a hostile name reaches a terminal.
TEST(Render, NothingATerminalCouldObey) {
  EXPECT_EQ(printable("a\x1b[31m\n\x7f\xc2\x9b"), "a\\x1b[31m\\n\\x7f\\x9b");
  EXPECT_EQ(printable("\xe2\x80\xae"), "\\u202e");
  EXPECT_EQ(printable("\xff\xc0\x80"), "\\xff\\xc0\\x80");
  EXPECT_EQ(printable("gr\xc3\xbc\xc3\x9f"), "gr\xc3\xbc\xc3\x9f");
  EXPECT_EQ(render(Value("it's\x1b")), "'it\\'s\\x1b'");
}

TEST(PrintedName, NoTwoNamesLookAlike) {
  EXPECT_EQ(printable_name("a\nb"), "a\\nb");
  EXPECT_EQ(printable_name("a\\nb"), "a\\\\nb");
  EXPECT_EQ(printable_name("\xc2\x9b"), "\\u009b");
  EXPECT_EQ(printable_name("\x9b"), "\\x9b");
  EXPECT_EQ(printed_name("a\\nb"), "a\nb");
  // What no name is printed as.
  for (const char* text : {"a\\", "\\q", "\\x4", "\\x41", "\\u0041", "\\u00", "plain"})
    EXPECT_EQ(printed_name(text), std::nullopt) << text;
}

TEST(PrintedName, IsReadBack) {
  const std::vector<std::string> pieces{
      "a",        "\\",   "n",    "x", "u", "9b",           "\n",     "\t", "\x1b",
      "\xc2\x9b", "\x9b", "\xff", "'", "[", "\xe2\x80\xae", "\u00e9", "0",  "\xed\xa0\x80"};
  std::mt19937 random(50);
  std::set<std::string> names, printed;
  for (int round = 0; round < 2000; ++round) {
    std::string name;
    for (unsigned left = random() % 6; left > 0; --left) name += pieces[random() % pieces.size()];
    const std::string text = printable_name(name);
    EXPECT_EQ(text == name ? name : printed_name(text), name) << text;
    names.insert(name);
    printed.insert(text);
  }
  EXPECT_EQ(names.size(), printed.size());
}

TEST(Render, IsCut) {
  EXPECT_LE(render(Value(std::string(10000, 'x')), 50).size(), 60U);
  Value shared = Value::list({1});
  for (int i = 0; i < 60; ++i) shared = Value::list({shared, shared});
  EXPECT_LE(render(shared, 100).size(), 120U);
  EXPECT_EQ(printable("abcdef", 3), "abc...");
}

}  // namespace
}  // namespace tessera
