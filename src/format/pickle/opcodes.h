// The opcodes of pickle protocols 0 to 5: one table says how each is written and what it does to
// the stack, and every reader of opcodes works with it.
#pragma once

#include <array>
#include <cstdint>

namespace tessera::pickle {

enum class Op : std::uint8_t {
  mark = '(',
  stop = '.',
  pop = '0',
  pop_mark = '1',
  dup = '2',
  real_text = 'F',
  int_text = 'I',
  binint = 'J',
  binint1 = 'K',
  long_text = 'L',
  binint2 = 'M',
  none = 'N',
  persid = 'P',
  binpersid = 'Q',
  reduce = 'R',
  string = 'S',
  binstring = 'T',
  short_binstring = 'U',
  unicode = 'V',
  binunicode = 'X',
  append = 'a',
  build = 'b',
  global = 'c',
  dict = 'd',
  empty_dict = '}',
  appends = 'e',
  get = 'g',
  binget = 'h',
  inst = 'i',
  long_binget = 'j',
  list = 'l',
  empty_list = ']',
  obj = 'o',
  put = 'p',
  binput = 'q',
  long_binput = 'r',
  setitem = 's',
  tuple = 't',
  empty_tuple = ')',
  setitems = 'u',
  binfloat = 'G',
  binbytes = 'B',
  short_binbytes = 'C',
  proto = 0x80,
  newobj,
  ext1,
  ext2,
  ext4,
  tuple1,
  tuple2,
  tuple3,
  newtrue,
  newfalse,
  long1,
  long4,
  short_binunicode = 0x8c,
  binunicode8,
  binbytes8,
  empty_set,
  additems,
  frozenset,
  newobj_ex,
  stack_global,
  memoize,
  frame,
  bytearray8 = 0x96,
  next_buffer,
  readonly_buffer,
};

// How an opcode's argument is written; numbers are little-endian.
enum class Argument : std::uint8_t {
  not_an_opcode,
  none,
  number1,  // a number of one byte
  number2,
  number4,
  number8,
  sized1,  // a length of one byte, then as many bytes
  sized4,
  sized8,
  line,  // up to a newline
  two_lines,
};

// `pops` of an opcode that takes everything above the topmost mark, and the mark.
inline constexpr std::uint8_t kToMark = 0xff;

struct Opcode {
  Argument argument = Argument::not_an_opcode;
  std::uint8_t pops = 0;
  std::uint8_t pushes = 0;
  bool target = false;  // the value below what it pops must be there, and stays
};

struct OpcodeRow {
  Op op;
  Opcode is;
};

// POP takes a mark when that is on top, and only the memo knows what GET pushes; the other rows say
// all there is about the stack.
inline constexpr std::array<OpcodeRow, 68> kOpcodeRows{{
    {Op::mark, {Argument::none, 0, 0}},
    {Op::stop, {Argument::none, 0, 0, true}},
    {Op::pop, {Argument::none, 1, 0}},
    {Op::pop_mark, {Argument::none, kToMark, 0}},
    {Op::dup, {Argument::none, 0, 1, true}},
    {Op::real_text, {Argument::line, 0, 1}},
    {Op::int_text, {Argument::line, 0, 1}},
    {Op::binint, {Argument::number4, 0, 1}},
    {Op::binint1, {Argument::number1, 0, 1}},
    {Op::long_text, {Argument::line, 0, 1}},
    {Op::binint2, {Argument::number2, 0, 1}},
    {Op::none, {Argument::none, 0, 1}},
    {Op::persid, {Argument::line, 0, 1}},
    {Op::binpersid, {Argument::none, 1, 1}},
    {Op::reduce, {Argument::none, 2, 1}},
    {Op::string, {Argument::line, 0, 1}},
    {Op::binstring, {Argument::sized4, 0, 1}},
    {Op::short_binstring, {Argument::sized1, 0, 1}},
    {Op::unicode, {Argument::line, 0, 1}},
    {Op::binunicode, {Argument::sized4, 0, 1}},
    {Op::append, {Argument::none, 1, 0, true}},
    {Op::build, {Argument::none, 1, 0, true}},
    {Op::global, {Argument::two_lines, 0, 1}},
    {Op::dict, {Argument::none, kToMark, 1}},
    {Op::empty_dict, {Argument::none, 0, 1}},
    {Op::appends, {Argument::none, kToMark, 0, true}},
    {Op::get, {Argument::line, 0, 1}},
    {Op::binget, {Argument::number1, 0, 1}},
    {Op::inst, {Argument::two_lines, kToMark, 1}},
    {Op::long_binget, {Argument::number4, 0, 1}},
    {Op::list, {Argument::none, kToMark, 1}},
    {Op::empty_list, {Argument::none, 0, 1}},
    {Op::obj, {Argument::none, kToMark, 1}},
    {Op::put, {Argument::line, 0, 0, true}},
    {Op::binput, {Argument::number1, 0, 0, true}},
    {Op::long_binput, {Argument::number4, 0, 0, true}},
    {Op::setitem, {Argument::none, 2, 0, true}},
    {Op::tuple, {Argument::none, kToMark, 1}},
    {Op::empty_tuple, {Argument::none, 0, 1}},
    {Op::setitems, {Argument::none, kToMark, 0, true}},
    {Op::binfloat, {Argument::number8, 0, 1}},
    {Op::binbytes, {Argument::sized4, 0, 1}},
    {Op::short_binbytes, {Argument::sized1, 0, 1}},
    {Op::proto, {Argument::number1, 0, 0}},
    {Op::newobj, {Argument::none, 2, 1}},
    {Op::ext1, {Argument::number1, 0, 1}},
    {Op::ext2, {Argument::number2, 0, 1}},
    {Op::ext4, {Argument::number4, 0, 1}},
    {Op::tuple1, {Argument::none, 1, 1}},
    {Op::tuple2, {Argument::none, 2, 1}},
    {Op::tuple3, {Argument::none, 3, 1}},
    {Op::newtrue, {Argument::none, 0, 1}},
    {Op::newfalse, {Argument::none, 0, 1}},
    {Op::long1, {Argument::sized1, 0, 1}},
    {Op::long4, {Argument::sized4, 0, 1}},
    {Op::short_binunicode, {Argument::sized1, 0, 1}},
    {Op::binunicode8, {Argument::sized8, 0, 1}},
    {Op::binbytes8, {Argument::sized8, 0, 1}},
    {Op::empty_set, {Argument::none, 0, 1}},
    {Op::additems, {Argument::none, kToMark, 0, true}},
    {Op::frozenset, {Argument::none, kToMark, 1}},
    {Op::newobj_ex, {Argument::none, 3, 1}},
    {Op::stack_global, {Argument::none, 2, 1}},
    {Op::memoize, {Argument::none, 0, 0, true}},
    {Op::frame, {Argument::number8, 0, 0}},
    {Op::bytearray8, {Argument::sized8, 0, 1}},
    {Op::next_buffer, {Argument::none, 0, 1}},
    {Op::readonly_buffer, {Argument::none, 0, 0, true}},
}};

// The opcode of each byte.
inline constexpr std::array<Opcode, 256> kOpcodes = [] {
  std::array<Opcode, 256> by_byte{};
  for (const OpcodeRow& row : kOpcodeRows) by_byte[static_cast<std::uint8_t>(row.op)] = row.is;
  return by_byte;
}();

constexpr const Opcode& opcode_of(Op op) noexcept {
  return kOpcodes[static_cast<std::uint8_t>(op)];
}

}  // namespace tessera::pickle
