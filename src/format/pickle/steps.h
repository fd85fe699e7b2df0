// What the opcodes do that every machine knows: how an argument is cut from the bytes, and which
// function of the machine gets it.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>

#include "format/pickle/opcodes.h"

namespace tessera::pickle {

// `Result`: void of a machine that throws, bool of one that says whether it goes on.
template <class M, class Result>
struct Steps {
  using Step = Result (*)(M& machine, const Opcode& opcode);
  struct Row {
    Op op;
    Step step;
  };

  // The step of each byte: the machine's own rows, those below, and `other` for the rest.
  static constexpr std::array<Step, 256> with(std::initializer_list<Row> own, Step other) {
    using O = const Opcode;
    const Step integer = [](M& m, O& o) {
      return m.push_integer(static_cast<std::int64_t>(m.cursor_.number(o.argument)));
    };
    const Step text = [](M& m, O& o) { return m.push_text(m.cursor_.text(o.argument)); };
    const Step put = [](M& m, O& o) { return m.memoize(m.cursor_.number(o.argument)); };
    const Step get = [](M& m, O& o) { return m.recall(m.cursor_.number(o.argument)); };
    const Step tuple = [](M& m, O& o) { return m.push_tuple(o); };
    const Step append = [](M& m, O& o) { return m.append(o); };
    const Step set_items = [](M& m, O& o) { return m.set_items(o); };
    const std::initializer_list<Row> shared = {
        {Op::proto, [](M& m, O&) { return m.read_protocol(); }},
        {Op::frame, [](M& m, O& o) { return m.enter_frame(m.cursor_.number(o.argument)); }},
        {Op::none, [](M& m, O&) { return m.push({}); }},
        {Op::newtrue, [](M& m, O&) { return m.push_bool(true); }},
        {Op::newfalse, [](M& m, O&) { return m.push_bool(false); }},
        {Op::binint,
         [](M& m, O&) { return m.push_integer(m.cursor_.template number<std::int32_t>()); }},
        {Op::binint1, integer},
        {Op::binint2, integer},
        {Op::long1, [](M& m, O& o) { return m.push_long(m.cursor_.bytes(o.argument)); }},
        {Op::short_binunicode, text},
        {Op::binunicode, text},
        {Op::memoize, [](M& m, O&) { return m.memoize_next(); }},
        {Op::binput, put},
        {Op::long_binput, put},
        {Op::binget, get},
        {Op::long_binget, get},
        {Op::mark, [](M& m, O&) { return m.open_mark(); }},
        {Op::pop, [](M& m, O&) { return m.drop(); }},
        {Op::empty_tuple, tuple},
        {Op::tuple1, tuple},
        {Op::tuple2, tuple},
        {Op::tuple3, tuple},
        {Op::tuple, tuple},
        {Op::empty_list, [](M& m, O&) { return m.push_empty_list(); }},
        {Op::empty_dict, [](M& m, O&) { return m.push_empty_dict(); }},
        {Op::append, append},
        {Op::appends, append},
        {Op::setitem, set_items},
        {Op::setitems, set_items},
        {Op::global, [](M& m, O&) { return m.push_global(); }},
        {Op::stack_global, [](M& m, O&) { return m.push_stack_global(); }},
        {Op::newobj, [](M& m, O&) { return m.new_object(); }},
        {Op::reduce, [](M& m, O&) { return m.reduce(); }},
        {Op::build, [](M& m, O&) { return m.build(); }},
    };
    std::array<Step, 256> by_byte{};
    by_byte.fill(other);
    for (const auto& rows : {shared, own})
      for (const Row& row : rows) by_byte[static_cast<std::uint8_t>(row.op)] = row.step;
    return by_byte;
  }
};

}  // namespace tessera::pickle
