// The table of opcodes against CPython's pickletools (tests/golden/make/opcodes.py).
#include "format/pickle/opcodes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>

#include "format/test_support.h"

namespace tessera::pickle {
namespace {

constexpr std::array<std::string_view, 11> kForms{"",        "none",    "number1",  "number2",
                                                  "number4", "number8", "sized1",   "sized4",
                                                  "sized8",  "line",    "two_lines"};

// As a line of the golden says it: form of the argument, values before and after.
std::string line_of(const Opcode& opcode) {
  const int under = opcode.target ? 1 : 0;
  const std::string before =
      opcode.pops != kToMark ? std::to_string(opcode.pops + under) : (under ? "mark+1" : "mark");
  return std::string(kForms.at(static_cast<std::size_t>(opcode.argument))) + " " + before + " " +
         std::to_string(opcode.pushes + under);
}

TEST(PickleOpcodes, AreThoseOfPython) {
  const std::vector<std::byte> bytes = test::golden("pickle/opcodes.txt");
  std::istringstream golden(std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
  std::size_t count = 0;
  for (std::string line; std::getline(golden, line); ++count) {
    const Op op{static_cast<std::uint8_t>(std::stoul(line.substr(0, 2), nullptr, 16))};
    std::string expected = line.substr(3);
    // Python counts a mark as a value and takes the result off the stack. Its PUTs need a value,
    // which its table leaves out.
    if (op == Op::mark) expected = "none 0 0";
    if (op == Op::stop) expected = "none 1 1";
    if (op == Op::put || op == Op::binput || op == Op::long_binput)
      expected.replace(expected.find(' '), std::string::npos, " 1 1");
    EXPECT_EQ(line_of(opcode_of(op)), expected) << line;
  }
  EXPECT_EQ(count, kOpcodeRows.size());
  EXPECT_EQ(std::ranges::count(kOpcodes, Argument::not_an_opcode, &Opcode::argument),
            256 - static_cast<std::ptrdiff_t>(count));
}

}  // namespace
}  // namespace tessera::pickle
