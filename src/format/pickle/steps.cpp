// What the machine does for each opcode.
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

constinit const std::array<Machine::Step, 256> Machine::kSteps = [] {
  using M = Machine;
  using O = const Opcode;
  const Step push_small = [](M& m, O& o) {
    m.push(Value(static_cast<std::int64_t>(m.cursor_.number(o.argument))));
  };
  const Step push_text = [](M& m, O& o) { m.push_text(m.cursor_.bytes(o.argument)); };
  const Step push_bytes = [](M& m, O& o) {
    m.push(Value::bytes(copy(m.cursor_.bytes(o.argument))));
  };
  const Step push_integer = [](M& m, O&) { m.push(parse_integer(m.cursor_.line())); };
  const Step push_tuple = [](M& m, O& o) { m.push_sequence(m.first_of(o), Value::tuple); };
  const Step append = [](M& m, O& o) { m.append_items(m.first_of(o)); };
  const Step set_items = [](M& m, O& o) { m.set_items(m.first_of(o)); };
  const Step put = [](M& m, O& o) { m.memoize(m.cursor_.number(o.argument)); };
  const Step get = [](M& m, O& o) { m.recall(m.cursor_.number(o.argument)); };
  const Step extension = [](M& m, O& o) { m.push_extension(m.cursor_.number(o.argument)); };
  const Step buffer = [](M&, O&) { refuse_buffer(); };
  return steps_by_byte<Step>(
      nullptr,
      {
          {Op::none, [](M& m, O&) { m.push(Value()); }},
          {Op::newtrue, [](M& m, O&) { m.push(Value(true)); }},
          {Op::newfalse, [](M& m, O&) { m.push(Value(false)); }},
          {Op::binint,
           [](M& m, O&) { m.push(Value(std::int64_t{m.cursor_.number<std::int32_t>()})); }},
          {Op::binint1, push_small},
          {Op::binint2, push_small},
          {Op::long1, [](M& m, O& o) { m.push_long(m.cursor_.bytes(o.argument)); }},
          {Op::long4, [](M& m, O&) { m.push_long(m.take_signed("an integer")); }},
          {Op::binfloat,
           [](M& m, O& o) {
             m.push(Value(std::bit_cast<double>(__builtin_bswap64(m.cursor_.number(o.argument)))));
           }},
          {Op::short_binunicode, push_text},
          {Op::short_binstring, push_text},
          {Op::binunicode, push_text},
          {Op::binunicode8, push_text},
          {Op::binstring, [](M& m, O&) { m.push_text(m.take_signed("a string")); }},
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

          {Op::empty_tuple, push_tuple},
          {Op::tuple1, push_tuple},
          {Op::tuple2, push_tuple},
          {Op::tuple3, push_tuple},
          {Op::tuple, push_tuple},
          {Op::empty_list, [](M& m, O&) { m.push_container(Value::list()); }},
          {Op::empty_set, [](M& m, O&) { m.push_container(Value::set()); }},
          {Op::empty_dict, [](M& m, O&) { m.push_container(Value::dict()); }},
          {Op::list, [](M& m, O& o) { m.push_sequence(m.first_of(o), Value::list); }},
          {Op::frozenset, [](M& m, O& o) { m.push_sequence(m.first_of(o), Value::frozenset); }},
          {Op::dict, [](M& m, O& o) { m.push_dict(m.first_of(o)); }},
          {Op::append, append},
          {Op::appends, append},
          {Op::additems, [](M& m, O& o) { m.add_to_set(m.first_of(o)); }},
          {Op::setitem, set_items},
          {Op::setitems, set_items},

          {Op::mark, [](M& m, O&) { m.open_mark(); }},
          {Op::pop, [](M& m, O&) { m.drop(); }},
          {Op::pop_mark, [](M& m, O& o) { m.stack_.resize(m.first_of(o)); }},
          {Op::dup, [](M& m, O&) { m.push_slot(m.top()); }},
          {Op::memoize, [](M& m, O&) { m.memoize_next(); }},
          {Op::binput, put},
          {Op::long_binput, put},
          {Op::put, [](M& m, O&) { m.memoize(parse_index(m.cursor_.line())); }},
          {Op::binget, get},
          {Op::long_binget, get},
          {Op::get, [](M& m, O&) { m.recall(parse_index(m.cursor_.line())); }},
          {Op::proto, [](M& m, O&) { m.read_protocol(); }},
          {Op::frame, [](M& m, O& o) { m.cursor_.enter_frame(m.cursor_.number(o.argument)); }},
          {Op::stop, [](M& m, O&) { m.stopped_ = true; }},

          {Op::global, [](M& m, O&) { m.push_global(); }},
          {Op::stack_global, [](M& m, O&) { m.push_stack_global(); }},
          {Op::reduce, [](M& m, O&) { m.reduce(); }},
          {Op::newobj, [](M& m, O&) { m.new_object(false); }},
          {Op::newobj_ex, [](M& m, O&) { m.new_object(true); }},
          {Op::build, [](M& m, O&) { m.build(); }},
          {Op::persid, [](M& m, O&) { m.load_persistent_text(); }},
          {Op::binpersid, [](M& m, O&) { m.load_persistent(m.pop()); }},
          {Op::inst, [](M& m, O&) { m.make_instance(true); }},
          {Op::obj, [](M& m, O&) { m.make_instance(false); }},
          {Op::ext1, extension},
          {Op::ext2, extension},
          {Op::ext4, extension},
          {Op::next_buffer, buffer},
          {Op::readonly_buffer, buffer},
      });
}();

}  // namespace tessera::pickle
