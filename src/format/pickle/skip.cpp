// Lists that are skipped (SkipRule): their opcodes are followed without making values.
//
// What is skipped leaves holes in the memo. When something outside refers to one, or puts an index
// that is not new, all skipped lists are read after all, in their order: every reference inside
// them then finds what it needs, and the memo is what it would have been.
#include <algorithm>
#include <array>
#include <utility>

#include "format/pickle/machine.h"

namespace tessera::pickle {
namespace {

using Kind = Value::Kind;

std::string class_name(const Value& global) {
  return global.global_module() + " " + global.global_name();
}

bool is_empty_attribute(const Value& key, const Value& list) {
  return list.is(Kind::list) && list.size() == 0 && key.is(Kind::string);
}

// Whether the rule is about this attribute of the instances of this class.
bool is_listed(const SkipRule& rule, const Value& owner_class, const Value& attribute) {
  return owner_class.is(Kind::global) &&
         std::ranges::any_of(rule.lists, [&](const SkipRule::Attribute& list_of) {
           return attribute.as_string() == list_of.name && class_name(owner_class) == list_of.owner;
         });
}

// Opcodes of which the table of opcodes says all that counts in a skipped list: their heights.
constexpr std::array<bool, 256> kPlain = [] {
  std::array<bool, 256> by_byte{};
  for (const Op op :
       {Op::none, Op::newtrue, Op::newfalse, Op::binint, Op::binint1, Op::binint2, Op::long1,
        Op::empty_tuple, Op::empty_list, Op::empty_dict, Op::tuple1, Op::tuple2, Op::tuple3,
        Op::tuple, Op::append, Op::setitem, Op::newobj, Op::reduce, Op::build})
    by_byte[static_cast<std::uint8_t>(op)] = true;
  return by_byte;
}();

// Follows the items of a list from behind their mark to their APPENDS. Answers false, and the list
// is read as usual, for anything that is not plain: the reader then says what is wrong, if
// anything is.
class Skipper {
 public:
  // `at` is in no frame. `harmless(index)`: whether a memo entry below `memo_end` may be mentioned.
  Skipper(const Cursor& at, std::uint64_t memo_end, const SkipRule& rule)
      : cursor_(at), memo_end_(memo_end), rule_(rule) {}

  template <class Harmless>
  bool run(const Harmless& harmless) {
    try {
      while (!done_) {
        if (!step(harmless)) return false;
      }
    } catch (const Error&) {
      return false;  // the bytes end
    }
    return true;
  }

  [[nodiscard]] std::size_t at() const noexcept { return cursor_.at(); }
  [[nodiscard]] std::uint64_t memo_end() const noexcept { return memo_end_; }

 private:
  // Values above the latest mark.
  [[nodiscard]] std::size_t above_mark() const { return depth_ - marks_[open_]; }

  template <class Harmless>
  bool step(const Harmless& harmless) {
    const Op op{cursor_.opcode()};
    const Opcode& opcode = opcode_of(op);
    if (kPlain[static_cast<std::uint8_t>(op)]) {
      cursor_.skip(opcode.argument);
      return follow(opcode);
    }
    switch (op) {
      case Op::binput:
      case Op::long_binput:
        return follow_if(is_next(cursor_.number(opcode.argument)), opcode);
      case Op::binget:
      case Op::long_binget:
        return follow_if(is_known(cursor_.number(opcode.argument), harmless), opcode);
      case Op::binunicode:
        return follow_if(is_ascii(cursor_.text(opcode.argument)), opcode);
      case Op::global:
        return follow_if(is_of_rule(), opcode);
      case Op::mark:
        return open_mark();
      case Op::setitems:
        return follow_if(above_mark() % 2 == 0, opcode);
      case Op::appends:
        done_ = open_ == 0;
        return done_ || follow(opcode);
      default:
        return false;
    }
  }

  bool follow_if(bool fits, const Opcode& opcode) { return fits && follow(opcode); }

  // Takes off and puts on as many values as the opcode does.
  bool follow(const Opcode& opcode) {
    if (opcode.pops != kToMark) {
      if (above_mark() < opcode.pops) return false;
      depth_ -= opcode.pops;
    } else {
      if (open_ == 0) return false;
      depth_ = marks_[open_--];
    }
    if (opcode.target && above_mark() == 0) return false;
    depth_ += opcode.pushes;
    return true;
  }

  bool open_mark() {
    if (open_ + 1 == marks_.size()) return false;
    marks_[++open_] = depth_;
    return true;
  }

  static bool is_ascii(std::string_view text) {
    return std::ranges::all_of(text, [](char c) { return static_cast<unsigned char>(c) < 0x80; });
  }

  bool is_of_rule() {
    const std::string_view module = cursor_.line();
    const std::string_view name = cursor_.line();
    return std::ranges::any_of(rule_.classes, [&](std::string_view known) {
      return known.size() == module.size() + 1 + name.size() && known.starts_with(module) &&
             known[module.size()] == ' ' && known.ends_with(name);
    });
  }

  template <class Harmless>
  bool is_known(std::uint64_t index, const Harmless& harmless) {
    if (index >= memo_end_) return false;
    std::uint64_t& known = known_[index % known_.size()];
    if (known != index + 1 && !harmless(index)) return false;
    known = index + 1;
    return true;
  }

  // Indices count up in a pickle of Python's; with others the memo could not be made up later.
  bool is_next(std::uint64_t index) {
    if (index != memo_end_) return false;
    ++memo_end_;
    return true;
  }

  Cursor cursor_;
  std::uint64_t memo_end_;
  const SkipRule& rule_;
  bool done_ = false;
  std::size_t depth_ = 0;                   // values above the list's own mark
  std::array<std::size_t, 65> marks_{};     // heights, from index 1 on
  std::size_t open_ = 0;                    // marks in use
  std::array<std::uint64_t, 256> known_{};  // memo indices + 1 that were found harmless
};

}  // namespace

// On the stack: an object, the dict of its attributes, a mark, perhaps pairs, a key and the empty
// list that is its value.
bool Machine::may_skip() const {
  const std::size_t size = stack_.size();
  if (marks_.empty() || marks_.back() + 2 > size || marks_.back() < 2 || cursor_.in_frame()) {
    return false;
  }
  const Value& list = stack_[size - 1].value;
  const Value& key = stack_[size - 2].value;
  const Value& owner = stack_[marks_.back() - 2].value;
  return is_empty_attribute(key, list) && owner.is(Kind::object) &&
         is_listed(*options_.skip, owner.as_object().callable, key);
}

bool Machine::is_harmless(std::uint64_t index) const {
  if (index >= memo_end_) return true;  // put in this list
  const Slot* slot = memo_entry(index);
  // What no value was made for lies in a skipped list, where every name is one of the rule's.
  if (slot == nullptr) return !skipped_.empty();
  if (!slot->value.is(Kind::global)) return true;
  const std::string name = class_name(slot->value);
  return std::ranges::count(options_.skip->classes, name) != 0;
}

void Machine::skip_list() {
  Skipper skipper(cursor_, memo_end_, *options_.skip);
  const bool plain = skipper.run([this](std::uint64_t index) { return is_harmless(index); });
  if (!plain) {
    skipping_ = false;
    marks_.push_back(stack_.size());
    return;
  }
  skipped_.push_back({cursor_.at() - 1, skipper.at()});
  memo_end_ = skipper.memo_end();
  cursor_.jump(skipper.at());
}

void Machine::read_skipped() {
  const std::vector<Region> regions = std::exchange(skipped_, {});
  const bool skipping = std::exchange(skipping_, false);
  const std::size_t back = cursor_.at();
  for (const Region& region : regions) {
    cursor_.jump(region.begin);
    push_container(Value::list());
    while (cursor_.at() < region.end) step();
    stack_.pop_back();
  }
  cursor_.jump(back);
  skipping_ = skipping;
}

}  // namespace tessera::pickle
