// Lists the names in a pickle. Follows which strings are where on the stack and in the memo, so
// that names put together through the memo are found too, and what getattr is called with.
#include <array>
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
        kSteps[static_cast<std::uint8_t>(op)](*this, opcode_of(op));
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

  using Step = void (*)(Scanner& scanner, const Opcode& opcode);
  static const std::array<Step, 256> kSteps;

  // What holds nothing of names: what it takes is gone, and what it makes is unknown.
  void pass(const Opcode& opcode) {
    cursor_.skip(opcode.argument);
    take(opcode);
    if (opcode.pushes != 0) push({});
  }

  void take(const Opcode& opcode) {
    if (opcode.pops == kToMark) return pop_to_mark();
    for (unsigned i = 0; i < opcode.pops; ++i) pop();
  }

  void read_global(const Opcode& opcode) {
    const Text module = cursor_.line();
    const Text name = cursor_.line();
    take(opcode);
    push_global(module, name);
  }

  void make_global() {
    const Item name = pop();
    const Item module = pop();
    if (name.kind != Kind::text || module.kind != Kind::text) {
      throw Error(ErrorCode::corrupt, "a name is not a string");
    }
    push_global(module.text, name.text);
  }

  void push_quoted() {
    Text quoted = cursor_.line();
    if (quoted.size() >= 2) quoted = quoted.substr(1, quoted.size() - 2);
    push_text(quoted);
  }

  void drop() {
    if (!marks_.empty() && marks_.back() == stack_.size()) {
      marks_.pop_back();
    } else {
      pop();
    }
  }

  void memoize(const Opcode& opcode) {
    const Item item = top();
    memo_[index(opcode)] = item;
  }

  void memoize_next() {
    const Item item = top();
    memo_[memo_.size()] = item;
  }

  std::uint64_t index(const Opcode& opcode) {
    if (opcode.argument != Argument::line) return cursor_.number(opcode.argument);
    const Value index = parse_integer(cursor_.line());
    if (!index.is(Value::Kind::integer)) throw Error(ErrorCode::corrupt, "a memo index is a bool");
    return static_cast<std::uint64_t>(index.as_int());
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

  void make_tuple(const Opcode& opcode) {
    const std::size_t floor = marks_.empty() ? 0 : marks_.back();
    const std::size_t count = opcode.pops == kToMark ? stack_.size() - floor : opcode.pops;
    const Item made = count == 2 && stack_.size() >= 2 ? pair_on_top() : Item{};
    take(opcode);
    push(made);
  }

  [[nodiscard]] Item pair_on_top() const {
    const Item& owner = stack_[stack_.size() - 2];
    const bool is_pair = owner.kind == Kind::global && stack_.back().kind == Kind::text;
    return is_pair ? Item{Kind::pair, stack_.back().text, owner.global} : Item{};
  }

  void reduce() {
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

// The opcodes with which names come about; the others only move the stack.
constinit const std::array<Scanner::Step, 256> Scanner::kSteps = [] {
  using S = Scanner;
  using O = const Opcode;
  const Step other = [](S& s, O& o) {
    if (o.argument == Argument::not_an_opcode) throw Error(ErrorCode::corrupt, "an unknown opcode");
    s.pass(o);
  };
  const Step text = [](S& s, O& o) { s.push_text(s.cursor_.text(o.argument)); };
  const Step global = [](S& s, O& o) { s.read_global(o); };
  const Step put = [](S& s, O& o) { s.memoize(o); };
  const Step get = [](S& s, O& o) { s.push(s.memo_[s.index(o)]); };
  const Step tuple = [](S& s, O& o) { s.make_tuple(o); };
  return steps_by_byte<Step>(
      other,
      {
          {Op::global, global},
          {Op::inst, global},
          {Op::stack_global, [](S& s, O&) { s.make_global(); }},
          {Op::short_binunicode, text},
          {Op::short_binstring, text},
          {Op::binunicode, text},
          {Op::binstring, text},
          {Op::binunicode8, text},
          {Op::unicode, [](S& s, O&) { s.push_text(s.cursor_.line()); }},
          {Op::string, [](S& s, O&) { s.push_quoted(); }},
          {Op::proto, [](S& s, O&) { s.protocol_ = s.cursor_.number<std::uint8_t>(); }},
          {Op::frame, [](S& s, O& o) { s.cursor_.enter_frame(s.cursor_.number(o.argument)); }},
          {Op::mark, [](S& s, O&) { s.marks_.push_back(s.stack_.size()); }},
          {Op::pop, [](S& s, O&) { s.drop(); }},
          {Op::dup, [](S& s, O&) { s.push(s.top()); }},
          {Op::memoize, [](S& s, O&) { s.memoize_next(); }},
          {Op::binput, put},
          {Op::long_binput, put},
          {Op::put, put},
          {Op::binget, get},
          {Op::long_binget, get},
          {Op::get, get},
          {Op::tuple, tuple},
          {Op::tuple2, tuple},
          {Op::reduce, [](S& s, O&) { s.reduce(); }},
      });
}();

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
