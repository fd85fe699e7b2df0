// What the machine of values does for the opcodes that it alone knows.
#include <bit>

#include "format/pickle/machine.h"
#include "format/pickle/text.h"

namespace tessera::pickle {
namespace {

std::vector<std::byte> copy(ByteView bytes) {
  return {bytes.begin(), bytes.end()};
}

[[noreturn]] void refuse_buffer() {
  throw Error(ErrorCode::unsupported, "the pickle's buffers are kept outside of it");
}

}  // namespace

constinit const std::array<Machine::MachineSteps::Step, 256> Machine::kSteps = [] {
  using M = Machine;
  using O = const Opcode;
  using Step = MachineSteps::Step;
  const Step push_text = [](M& m, O& o) { m.push_text(m.cursor_.text(o.argument)); };
  const Step push_bytes = [](M& m, O& o) {
    m.push(Value::bytes(copy(m.cursor_.bytes(o.argument))));
  };
  const Step push_integer = [](M& m, O&) { m.push(parse_integer(m.cursor_.line())); };
  const Step extension = [](M& m, O& o) { m.push_extension(m.cursor_.number(o.argument)); };
  const Step buffer = [](M&, O&) { refuse_buffer(); };
  return MachineSteps::with(
      {
          {Op::long4, [](M& m, O&) { m.push_long(m.cursor_.take(m.signed_size("an integer"))); }},
          {Op::binfloat,
           [](M& m, O& o) {
             m.push(Value(std::bit_cast<double>(__builtin_bswap64(m.cursor_.number(o.argument)))));
           }},
          {Op::short_binstring, push_text},
          {Op::binunicode8, push_text},
          {Op::binstring, [](M& m, O&) { m.push_text(m.cursor_.text(m.signed_size("a string"))); }},
          {Op::short_binbytes, push_bytes},
          {Op::binbytes, push_bytes},
          {Op::binbytes8, push_bytes},
          {Op::bytearray8,
           [](M& m, O& o) { m.push(Value::bytearray(copy(m.cursor_.bytes(o.argument)))); }},
          {Op::int_text, push_integer},
          {Op::long_text, push_integer},
          {Op::real_text, [](M& m, O&) { m.push(Value(parse_real(m.cursor_.line()))); }},
          {Op::string, [](M& m, O&) { m.push(Value(unquote(m.cursor_.line()))); }},
          {Op::unicode, [](M& m, O&) { m.push(Value(decode_raw_unicode(m.cursor_.line()))); }},

          {Op::empty_set, [](M& m, O&) { m.push_container(Value::set()); }},
          {Op::list, [](M& m, O& o) { m.push_sequence(m.first_of(o), Value::list); }},
          {Op::frozenset, [](M& m, O& o) { m.push_sequence(m.first_of(o), Value::frozenset); }},
          {Op::dict, [](M& m, O& o) { m.push_dict(m.first_of(o)); }},
          {Op::additems, [](M& m, O& o) { m.add_to_set(m.first_of(o)); }},

          {Op::pop_mark, [](M& m, O& o) { m.stack_.resize(m.first_of(o)); }},
          {Op::dup, [](M& m, O&) { m.push_slot(m.top()); }},
          {Op::put, [](M& m, O&) { m.memoize(parse_index(m.cursor_.line())); }},
          {Op::get, [](M& m, O&) { m.recall(parse_index(m.cursor_.line())); }},
          {Op::stop, [](M& m, O&) { m.stopped_ = true; }},

          {Op::newobj_ex, [](M& m, O&) { m.new_object(true); }},
          {Op::persid, [](M& m, O&) { m.load_persistent_text(); }},
          {Op::binpersid, [](M& m, O&) { m.load_persistent(m.pop()); }},
          {Op::inst, [](M& m, O&) { m.make_instance(true); }},
          {Op::obj, [](M& m, O&) { m.make_instance(false); }},
          {Op::ext1, extension},
          {Op::ext2, extension},
          {Op::ext4, extension},
          {Op::next_buffer, buffer},
          {Op::readonly_buffer, buffer},
      },
      nullptr);
}();

}  // namespace tessera::pickle
