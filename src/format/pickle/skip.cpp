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
      const auto op = static_cast<Op>(*at_++);
      if (op == Op::binget || op == Op::long_binget) {
        std::uint64_t index = 0;
        if (!take_index(op == Op::binget, index) || index >= memo_end_) return false;
        if (!is_known(index)) {
          if (!harmless(index)) return false;
          known_[index % known_.size()] = index + 1;
        }
        ++depth_;
      } else if (!step(op)) {
        return false;
      }
    }
    return true;
  }

  [[nodiscard]] const std::byte* at() const noexcept { return at_; }
  [[nodiscard]] std::uint64_t memo_end() const noexcept { return memo_end_; }

 private:
  [[nodiscard]] std::size_t left() const { return static_cast<std::size_t>(end_ - at_); }
  [[nodiscard]] bool is_known(std::uint64_t index) const {
    return known_[index % known_.size()] == index + 1;
  }

  bool push_after(std::size_t bytes) {
    if (bytes > left()) return false;
    at_ += bytes;
    ++depth_;
    return true;
  }

  // Replaces `count` values above the latest mark by one.
  bool merge(std::size_t count) {
    if (depth_ - floor() < count) return false;
    depth_ -= count - 1;
    return true;
  }

  [[nodiscard]] std::size_t floor() const { return open_ == 0 ? 0 : marks_[open_ - 1]; }

  // The number of values above the latest mark, which is removed with them.
  bool pop_mark(std::size_t& count) {
    if (open_ == 0) return false;
    count = depth_ - marks_[--open_];
    depth_ = marks_[open_];
    return true;
  }

  bool take_index(bool one_byte, std::uint64_t& index) {
    const std::size_t size = one_byte ? 1 : 4;
    if (size > left()) return false;
    index = one_byte ? std::to_integer<std::uint64_t>(*at_) : load_le<std::uint32_t>(at_);
    at_ += size;
    return true;
  }

  // Indices count up in a pickle of Python's; with others the memo could not be made up later.
  bool put(bool one_byte) {
    std::uint64_t index = 0;
    if (depth_ == floor() || !take_index(one_byte, index) || index != memo_end_) return false;
    ++memo_end_;
    return true;
  }

  bool text() {
    if (left() < 4) return false;
    const auto size = load_le<std::uint32_t>(at_);
    at_ += 4;
    if (size > left()) return false;
    const bool ascii =
        std::all_of(at_, at_ + size, [](std::byte b) { return b < std::byte{0x80}; });
    return ascii && push_after(size);
  }

  bool global() {
    const std::string_view rest(reinterpret_cast<const char*>(at_), left());
    for (const std::string_view name : rule_.classes) {
      const std::size_t split = name.find(' ');
      const bool same = rest.size() >= name.size() + 1 &&
                        rest.substr(0, split) == name.substr(0, split) && rest[split] == '\n' &&
                        rest.substr(split + 1).starts_with(name.substr(split + 1)) &&
                        rest[name.size()] == '\n';
      if (same) return push_after(name.size() + 1);
    }
    return false;
  }

  bool step(Op op);

  const std::byte* at_;
  const std::byte* end_;
  std::uint64_t memo_end_;
  const SkipRule& rule_;
  bool done_ = false;
  std::size_t depth_ = 0;                   // values above the list's own mark
  std::array<std::size_t, 64> marks_{};     // heights
  std::size_t open_ = 0;                    // marks in use
  std::array<std::uint64_t, 256> known_{};  // memo indices + 1 that were found harmless
};

bool Skipper::step(Op op) {
  std::size_t count = 0;
  switch (op) {
    case Op::none:
    case Op::newtrue:
    case Op::newfalse:
    case Op::empty_tuple:
    case Op::empty_list:
    case Op::empty_dict:
      ++depth_;
      return true;
    case Op::binint1:
      return push_after(1);
    case Op::binint2:
      return push_after(2);
    case Op::binint:
      return push_after(4);
    case Op::long1:
      return left() > 0 && push_after(1 + std::to_integer<std::size_t>(*at_));
    case Op::binunicode:
      return text();
    case Op::global:
      return global();
    case Op::binput:
    case Op::long_binput:
      return put(op == Op::binput);
    case Op::mark:
      if (open_ == marks_.size()) return false;
      marks_[open_++] = depth_;
      return true;
    case Op::tuple1:
      return merge(1);
    case Op::tuple2:
    case Op::append:
    case Op::newobj:
    case Op::reduce:
    case Op::build:
      return merge(2);
    case Op::tuple3:
    case Op::setitem:
      return merge(3);
    case Op::tuple:
      if (!pop_mark(count)) return false;
      ++depth_;
      return true;
    case Op::setitems:
      return pop_mark(count) && count % 2 == 0 && depth_ > floor();
    case Op::appends:
      done_ = open_ == 0;
      return done_ || (pop_mark(count) && depth_ > floor());
    default:
      return false;
  }
}

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
  if (!list.is(Kind::list) || list.size() != 0 || !key.is(Kind::string) ||
      !owner.is(Kind::object) || !owner.as_object().callable.is(Kind::global)) {
    return false;
  }
  return std::any_of(options_.skip->lists.begin(), options_.skip->lists.end(),
                     [&](const SkipRule::Attribute& list_of) {
                       return key.as_string() == list_of.name &&
                              class_name(owner.as_object().callable) == list_of.owner;
                     });
}

void Machine::skip_list() {
  Skipper skipper(cursor_.rest(), memo_end_, *options_.skip);
  const bool plain = skipper.run([this](std::uint64_t index) {
    if (index >= memo_end_) return true;  // put in this list
    const Slot* slot = nullptr;
    if (index < memo_.size() && memo_[index].cell != kUnset) slot = &memo_[index];
    const auto sparse = slot == nullptr ? sparse_memo_.find(index) : sparse_memo_.end();
    if (sparse != sparse_memo_.end()) slot = &sparse->second;
    // What no value was made for lies in a skipped list, where every name is one of the rule's.
    if (slot == nullptr) return !skipped_.empty();
    if (!slot->value.is(Kind::global)) return true;
    const std::string name = class_name(slot->value);
    const auto& classes = options_.skip->classes;
    return std::find(classes.begin(), classes.end(), name) != classes.end();
  });
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
    while (cursor_.at() < region.end) {
      const std::uint8_t code = cursor_.opcode();
      if (!step(static_cast<Op>(code)))
        throw Error(ErrorCode::corrupt, "byte " + std::to_string(code) + " is not an opcode");
    }
    stack_.pop_back();
  }
  cursor_.jump(back);
  skipping_ = skipping;
}

}  // namespace tessera::pickle
