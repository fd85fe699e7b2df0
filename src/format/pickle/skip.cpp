// Lists that are skipped (SkipRule): their opcodes are followed without making values.
//
// What is skipped leaves holes in the memo. When something outside refers to one, or puts an index
// that is not new, all skipped lists are read after all, in their order: every reference inside
// them then finds what it needs, and the memo is what it would have been.
#include <algorithm>
#include <array>
#include <type_traits>
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

// What an opcode without a mark and without text does, from the table of opcodes.
struct Plain {
  bool known = false;
  std::uint8_t bytes = 0;  // of its argument
  std::uint8_t needs = 0;  // values above the latest mark
  std::int8_t change = 0;  // of the height
};

constexpr std::array<Plain, 256> kPlain = [] {
  std::array<Plain, 256> by_byte{};
  for (const Op op : {Op::none, Op::newtrue, Op::newfalse, Op::empty_tuple, Op::empty_list,
                      Op::empty_dict, Op::binint, Op::binint1, Op::binint2, Op::tuple1, Op::tuple2,
                      Op::tuple3, Op::append, Op::setitem, Op::newobj, Op::reduce, Op::build}) {
    const Opcode& is = opcode_of(op);
    by_byte[static_cast<std::uint8_t>(op)] = {
        .known = true,
        .bytes = width_of(is.argument),
        .needs = static_cast<std::uint8_t>(is.pops + is.target),
        .change = static_cast<std::int8_t>(is.pushes - is.pops)};
  }
  return by_byte;
}();

// Follows the items of a list from behind their mark to their APPENDS. Answers false, and the list
// is read as usual, for anything that is not plain: the reader then says what is wrong, if
// anything is.
class Skipper {
 public:
  // `harmless(index)`: whether a memo entry below `memo_end` may be mentioned.
  Skipper(ByteView bytes, std::uint64_t memo_end, const SkipRule& rule)
      : at_(bytes.data()), end_(bytes.data() + bytes.size()), memo_end_(memo_end), rule_(rule) {}

  template <class Harmless>
  bool run(const Harmless& harmless) {
    while (!done_) {
      if (at_ == end_) return false;
      const Op op{std::to_integer<std::uint8_t>(*at_++)};
      const Plain& plain = kPlain[static_cast<std::uint8_t>(op)];
      if (!(plain.known ? follow(plain) : step(op, harmless))) return false;
    }
    return true;
  }

  [[nodiscard]] const std::byte* at() const noexcept { return at_; }
  [[nodiscard]] std::uint64_t memo_end() const noexcept { return memo_end_; }

 private:
  [[nodiscard]] std::size_t left() const { return static_cast<std::size_t>(end_ - at_); }
  // Values above the latest mark.
  [[nodiscard]] std::size_t above_mark() const { return depth_ - marks_[open_]; }

  bool follow(const Plain& plain) {
    if (plain.bytes > left() || plain.needs > above_mark()) return false;
    at_ += plain.bytes;
    depth_ += static_cast<std::size_t>(plain.change);
    return true;
  }

  template <class Harmless>
  bool step(Op op, const Harmless& harmless) {
    switch (op) {
      case Op::binput:
        return put<Op::binput>();
      case Op::long_binput:
        return put<Op::long_binput>();
      case Op::binget:
        return get<Op::binget>(harmless);
      case Op::long_binget:
        return get<Op::long_binget>(harmless);
      case Op::long1:
        return push_long();
      case Op::binunicode:
        return push_ascii();
      case Op::global:
        return push_global();
      case Op::mark:
        return open_mark();
      case Op::tuple:
        return close<Op::tuple>();
      case Op::setitems:
        return above_mark() % 2 == 0 && close<Op::setitems>();
      case Op::appends:
        done_ = open_ == 0;
        return done_ || close<Op::appends>();
      default:
        return false;
    }
  }

  // The number that the opcode's argument is or begins with.
  template <Op op>
  bool take(std::uint64_t& number) {
    constexpr std::size_t kWidth = width_of(opcode_of(op).argument);
    using Number = std::conditional_t<kWidth == 1, std::uint8_t, std::uint32_t>;
    static_assert(kWidth == sizeof(Number));
    if (kWidth > left()) return false;
    number = load_le<Number>(at_);
    at_ += kWidth;
    return true;
  }

  bool push_long() {
    std::uint64_t size = 0;
    if (!take<Op::long1>(size) || size > left()) return false;
    at_ += size;
    ++depth_;
    return true;
  }

  bool push_ascii() {
    std::uint64_t size = 0;
    if (!take<Op::binunicode>(size) || size > left()) return false;
    const std::byte* const text = std::exchange(at_, at_ + size);
    ++depth_;
    return std::all_of(text, at_, [](std::byte b) { return b < std::byte{0x80}; });
  }

  bool push_global() {
    const std::string_view rest(reinterpret_cast<const char*>(at_), left());
    const auto named = std::ranges::find_if(rule_.classes, [rest](std::string_view name) {
      const std::size_t split = name.find(' ');
      return rest.size() > name.size() && rest.starts_with(name.substr(0, split)) &&
             rest[split] == '\n' && rest.substr(split + 1).starts_with(name.substr(split + 1)) &&
             rest[name.size()] == '\n';
    });
    if (named == rule_.classes.end()) return false;
    at_ += named->size() + 1;
    ++depth_;
    return true;
  }

  bool open_mark() {
    if (open_ + 1 == marks_.size()) return false;
    marks_[++open_] = depth_;
    return true;
  }

  // Takes what is above the latest mark, and the mark.
  template <Op op>
  bool close() {
    constexpr Opcode kIs = opcode_of(op);
    static_assert(kIs.pops == kToMark);
    if (open_ == 0) return false;
    depth_ = marks_[open_--];
    if (kIs.target && above_mark() == 0) return false;
    depth_ += kIs.pushes;
    return true;
  }

  template <Op op, class Harmless>
  bool get(const Harmless& harmless) {
    std::uint64_t index = 0;
    if (!take<op>(index) || index >= memo_end_) return false;
    std::uint64_t& known = known_[index % known_.size()];
    if (known != index + 1 && !harmless(index)) return false;
    known = index + 1;
    ++depth_;
    return true;
  }

  // Indices count up in a pickle of Python's; with others the memo could not be made up later.
  template <Op op>
  bool put() {
    std::uint64_t index = 0;
    if (above_mark() == 0 || !take<op>(index) || index != memo_end_) return false;
    ++memo_end_;
    return true;
  }

  const std::byte* at_;
  const std::byte* end_;
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
  Skipper skipper(cursor_.rest(), memo_end_, *options_.skip);
  const bool plain = skipper.run([this](std::uint64_t index) { return is_harmless(index); });
  if (!plain) {
    skipping_ = false;
    marks_.push_back(stack_.size());
    return;
  }
  const std::size_t begin = cursor_.at() - 1;
  const std::size_t end =
      cursor_.at() + static_cast<std::size_t>(skipper.at() - cursor_.rest().data());
  skipped_.push_back({begin, end});
  memo_end_ = skipper.memo_end();
  cursor_.jump(end);
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
