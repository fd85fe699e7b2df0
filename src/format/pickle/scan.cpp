// Lists the names in a pickle. Follows only which strings are where on the stack and in the memo,
// so that names put together through the memo are found too.
#include <unordered_map>
#include <unordered_set>

#include "format/pickle/cursor.h"
#include "format/pickle/names.h"
#include "format/pickle/opcodes.h"
#include "format/pickle/pickle.h"
#include "format/pickle/text.h"

namespace tessera::pickle {
namespace {

class Scanner {
 public:
  Scanner(ByteView bytes, Mentions& found) : cursor_(bytes), found_(found) {}

  void run() {
    std::size_t at = 0;
    try {
      for (Op op = Op::mark; op != Op::stop;) {
        at = cursor_.at();
        op = static_cast<Op>(cursor_.opcode());
        if (!step_name(op) && !step_stack(op) && !step_data(op)) {
          throw Error(ErrorCode::corrupt, "an unknown opcode");
        }
      }
    } catch (Error& error) {
      error.at_offset(at);
      throw;
    }
    found_.consumed = cursor_.at();
  }

 private:
  using Text = std::string_view;  // data() null: not a string

  bool step_name(Op op) {
    switch (op) {
      case Op::global:
      case Op::inst: {
        const Text module = cursor_.line();
        const Text name = cursor_.line();
        if (op == Op::inst) pop_to_mark();
        mention(module, name);
        return true;
      }
      case Op::stack_global: {
        const Text name = pop();
        const Text module = pop();
        if (name.data() == nullptr || module.data() == nullptr) {
          throw Error(ErrorCode::corrupt, "a name is not a string");
        }
        mention(module, name);
        return true;
      }
      case Op::short_binunicode:
      case Op::short_binstring:
        push(cursor_.text(cursor_.number<std::uint8_t>()));
        return true;
      case Op::binunicode:
      case Op::binstring:
        push(cursor_.text(cursor_.number<std::uint32_t>()));
        return true;
      case Op::binunicode8:
        push(cursor_.text(cursor_.number<std::uint64_t>()));
        return true;
      case Op::unicode:
        push(cursor_.line());
        return true;
      case Op::string: {
        Text quoted = cursor_.line();
        if (quoted.size() >= 2) quoted = quoted.substr(1, quoted.size() - 2);
        push(quoted);
        return true;
      }
      case Op::proto:
        protocol_ = cursor_.number<std::uint8_t>();
        return true;
      case Op::frame:
        cursor_.enter_frame(cursor_.number<std::uint64_t>());
        return true;
      default:
        return false;
    }
  }

  bool step_stack(Op op) {
    switch (op) {
      case Op::mark:
        marks_.push_back(stack_.size());
        return true;
      case Op::pop:
        if (!marks_.empty() && marks_.back() == stack_.size()) {
          marks_.pop_back();
        } else {
          pop();
        }
        return true;
      case Op::dup: {
        const Text text = pop();
        push(text);
        push(text);
        return true;
      }
      case Op::memoize:
        memo_[memo_.size()] = top();
        return true;
      case Op::binput:
        memo_[cursor_.number<std::uint8_t>()] = top();
        return true;
      case Op::long_binput:
        memo_[cursor_.number<std::uint32_t>()] = top();
        return true;
      case Op::put:
        memo_[index(cursor_.line())] = top();
        return true;
      case Op::binget:
        push(memo_[cursor_.number<std::uint8_t>()]);
        return true;
      case Op::long_binget:
        push(memo_[cursor_.number<std::uint32_t>()]);
        return true;
      case Op::get:
        push(memo_[index(cursor_.line())]);
        return true;
      case Op::tuple:
      case Op::list:
      case Op::dict:
      case Op::frozenset:
      case Op::obj:
        return replace_to_mark();
      case Op::appends:
      case Op::setitems:
      case Op::additems:
      case Op::pop_mark:
        pop_to_mark();
        return true;
      case Op::reduce:
      case Op::newobj:
      case Op::tuple2:
        return replace(2);
      case Op::newobj_ex:
      case Op::tuple3:
        return replace(3);
      case Op::tuple1:
      case Op::binpersid:
        return replace(1);
      case Op::setitem:
        pop();
        [[fallthrough]];
      case Op::append:
      case Op::build:
        pop();
        return true;
      default:
        return false;
    }
  }

  bool step_data(Op op) {
    switch (op) {
      case Op::stop:
      case Op::readonly_buffer:
        return true;
      case Op::none:
      case Op::newtrue:
      case Op::newfalse:
      case Op::empty_tuple:
      case Op::empty_list:
      case Op::empty_dict:
      case Op::empty_set:
      case Op::next_buffer:
        return skip(0);
      case Op::binint1:
      case Op::ext1:
        return skip(1);
      case Op::binint2:
      case Op::ext2:
        return skip(2);
      case Op::binint:
      case Op::ext4:
        return skip(4);
      case Op::binfloat:
        return skip(8);
      case Op::long1:
      case Op::short_binbytes:
        return skip(cursor_.number<std::uint8_t>());
      case Op::long4:
      case Op::binbytes:
        return skip(cursor_.number<std::uint32_t>());
      case Op::binbytes8:
      case Op::bytearray8:
        return skip(cursor_.number<std::uint64_t>());
      case Op::int_text:
      case Op::long_text:
      case Op::real_text:
      case Op::persid:
        (void)cursor_.line();
        push({});
        return true;
      default:
        return false;
    }
  }

  static std::uint64_t index(Text text) {
    const Value index = parse_integer(text);
    if (!index.is(Value::Kind::integer)) throw Error(ErrorCode::corrupt, "a memo index is a bool");
    return static_cast<std::uint64_t>(index.as_int());
  }

  bool skip(std::uint64_t size) {
    (void)cursor_.take(size);
    push({});
    return true;
  }

  void mention(Text module, Text name) {
    std::string of_module(module);
    std::string of_name(name);
    if (protocol_ < 3) from_python2(of_module, of_name);
    if (known_.insert(of_module + "\n" + of_name).second)
      found_.names.push_back({std::move(of_module), std::move(of_name)});
    push({});
  }

  void push(Text text) { stack_.push_back(text); }

  Text pop() {
    const Text text = top();
    stack_.pop_back();
    return text;
  }

  Text top() const {
    if (stack_.size() <= (marks_.empty() ? 0 : marks_.back())) {
      throw Error(ErrorCode::corrupt, "an opcode finds the stack empty");
    }
    return stack_.back();
  }

  void pop_to_mark() {
    if (marks_.empty())
      throw Error(ErrorCode::corrupt, "an opcode needs a mark, the stack has none");
    stack_.resize(marks_.back());
    marks_.pop_back();
  }

  bool replace_to_mark() {
    pop_to_mark();
    push({});
    return true;
  }

  bool replace(int count) {
    for (int i = 0; i < count; ++i) pop();
    push({});
    return true;
  }

  Cursor cursor_;
  int protocol_ = 0;
  std::vector<Text> stack_;
  std::vector<std::size_t> marks_;
  std::unordered_map<std::uint64_t, Text> memo_;
  std::unordered_set<std::string> known_;  // what found_ has: module, line end, name
  Mentions& found_;
};

}  // namespace

void find_mentions(ByteView bytes, Mentions& found) {
  Scanner(bytes, found).run();
}

std::vector<std::string> globals(ByteView bytes) {
  std::vector<std::string> names;
  Mentions found;
  find_mentions(bytes, found);
  for (const Mention& mention : found.names) names.push_back(mention.module + "." + mention.name);
  return names;
}

}  // namespace tessera::pickle
