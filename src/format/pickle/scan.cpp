// Lists the names in a pickle. Follows which strings are where on the stack and in the memo, so
// that names put together through the memo are found too, and what getattr is called with.
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
      mention_getattr();
      error.at_offset(at);
      throw;
    }
    mention_getattr();
    found_.consumed = cursor_.at();
  }

 private:
  using Text = std::string_view;

  // What is known of a value on the stack.
  struct Item {
    enum class Kind : std::uint8_t { other, text, global, getattr, pair } kind = Kind::other;
    Text text;               // text: itself; pair, of a global and a text: the text
    std::size_t global = 0;  // global and pair: the number in `globals_`
  };
  using Kind = Item::Kind;

  bool step_name(Op op) {
    switch (op) {
      case Op::global:
      case Op::inst: {
        const Text module = cursor_.line();
        const Text name = cursor_.line();
        if (op == Op::inst) pop_to_mark();
        push_global(module, name);
        return true;
      }
      case Op::stack_global: {
        const Item name = pop();
        const Item module = pop();
        if (name.kind != Kind::text || module.kind != Kind::text) {
          throw Error(ErrorCode::corrupt, "a name is not a string");
        }
        push_global(module.text, name.text);
        return true;
      }
      case Op::short_binunicode:
      case Op::short_binstring:
        push_text(cursor_.text(cursor_.number<std::uint8_t>()));
        return true;
      case Op::binunicode:
      case Op::binstring:
        push_text(cursor_.text(cursor_.number<std::uint32_t>()));
        return true;
      case Op::binunicode8:
        push_text(cursor_.text(cursor_.number<std::uint64_t>()));
        return true;
      case Op::unicode:
        push_text(cursor_.line());
        return true;
      case Op::string: {
        Text quoted = cursor_.line();
        if (quoted.size() >= 2) quoted = quoted.substr(1, quoted.size() - 2);
        push_text(quoted);
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
        push(top());
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
        return make_tuple(marks_.empty() ? 0 : stack_.size() - marks_.back(), true);
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
        return reduce();
      case Op::tuple2:
        return make_tuple(2, false);
      case Op::newobj:
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

  void push_text(Text text) { push({Kind::text, text, 0}); }

  void push_global(Text module, Text name) {
    Mention global{std::string(module), std::string(name)};
    if (protocol_ < 3) from_python2(global.module, global.name);
    if (global.module == "builtins" && global.name == "getattr")
      return push({Kind::getattr, {}, 0});
    mention(global);
    globals_.push_back(std::move(global));
    push({Kind::global, {}, globals_.size() - 1});
  }

  void mention(const Mention& global) {
    if (known_.insert(global.module + "\n" + global.name).second) found_.names.push_back(global);
  }

  // A getattr is harmless where a known member is what it gives. One that went anywhere else
  // counts.
  void mention_getattr() {
    if (getattrs_ > 0) mention({"builtins", "getattr"});
    getattrs_ = 0;
  }

  // A tuple of the topmost `count`.
  bool make_tuple(std::size_t count, bool to_mark) {
    Item pair;
    if (count == 2 && stack_.size() >= 2) {
      const Item& owner = stack_[stack_.size() - 2];
      if (owner.kind == Kind::global && stack_.back().kind == Kind::text)
        pair = {Kind::pair, stack_.back().text, owner.global};
    }
    if (to_mark) {
      pop_to_mark();
    } else {
      drop(count);
    }
    push(pair);
    return true;
  }

  bool reduce() {
    const Item arguments = pop();
    const Item callable = pop();
    if (callable.kind == Kind::getattr && arguments.kind == Kind::pair) {
      const Mention& owner = globals_[arguments.global];
      const std::string name(arguments.text);
      if (is_known_member(owner.module, owner.name, name)) {
        --getattrs_;
        mention({owner.module, owner.name + "." + name});
      }
    }
    push({});
    return true;
  }

  void push(Item item) {
    if (item.kind == Kind::getattr) ++getattrs_;
    stack_.push_back(item);
  }

  Item pop() {
    const Item item = top();
    stack_.pop_back();
    return item;
  }

  [[nodiscard]] Item top() const {
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

  bool replace(std::size_t count) {
    drop(count);
    push({});
    return true;
  }

  void drop(std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) pop();
  }

  Cursor cursor_;
  int protocol_ = 0;
  std::vector<Item> stack_;
  std::vector<std::size_t> marks_;
  std::unordered_map<std::uint64_t, Item> memo_;
  std::vector<Mention> globals_;           // every use of a global but getattr
  std::uint64_t getattrs_ = 0;             // pushed, and not called for a known member
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
