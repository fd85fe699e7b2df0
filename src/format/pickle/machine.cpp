#include "format/pickle/machine.h"

#include <algorithm>
#include <cctype>
#include <cmath>

#include "base/text.h"
#include "format/pickle/text.h"
#include "value/integer.h"
#include "value/render.h"

namespace tessera::pickle {
void corrupt(std::string what) {
  throw Error(ErrorCode::corrupt, std::move(what));
}

namespace {

using Kind = Value::Kind;

constexpr int kNewestProtocol = 5;

// A value in many places is one object in Python, and here. Whatever names leaves, prints or writes
// them one by one has it as often as it has places: a dict that holds the same dict twice, and so
// on, is a million leaves in 2 KB. So that is counted here, before anybody does it. What a pickle
// may unfold to is a multiple of what it says, far above anything that trainings share; the first
// bytes are free.
constexpr std::uint64_t kFreeUnfolding = 64 << 20;
constexpr std::uint64_t kMostUnfolding = 16;
constexpr std::uint64_t kFreeCopies = 1 << 18;
constexpr std::uint64_t kMostCopies = 4;
// Bytes that a step of a path adds to each leaf below: the step itself, and as text an index.
constexpr std::uint64_t kOfStep = 48;
constexpr std::uint64_t kOfIndex = 8;

[[noreturn]] void refuse_cycle() {
  throw Error(
      ErrorCode::unsupported,
      "a container is put into itself, or changes after it was put into another: the values "
      "form a cycle");
}

std::uint64_t saturating_add(std::uint64_t a, std::uint64_t b) {
  return a + b < a ? ~std::uint64_t{0} : a + b;
}

// Bytes of a value that holds no others, beside its node.
std::uint64_t text_of(const Value& value) {
  switch (value.kind()) {
    case Kind::string:
      return value.as_string().size();
    case Kind::bytes:
    case Kind::bytearray:
      return value.as_bytes().size();
    case Kind::integer:
      return 3 * value.as_integer().big.size();  // digits
    default:
      return 0;
  }
}

std::uint64_t bytes_of_step(const Value& key) {
  return kOfStep + (key.is(Kind::string) ? key.as_string().size() : kOfIndex);
}

// Whether Python may take the text of a number that is not read here: 0x1f, 1_000, a blank behind.
bool may_be_number(std::string_view text) {
  const auto is_part = [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 || is_one_of(c, '_', '+', '-', '.');
  };
  constexpr std::string_view kBlanks = " \t\v\f\r";
  text = text.substr(0, text.find('\0'));
  if (text.empty()) return true;  // to C, a 0
  text.remove_prefix(std::min(text.find_first_not_of(kBlanks), text.size()));
  text = text.substr(0, text.find_last_not_of(kBlanks) + 1);
  return text.find_first_of("0123456789") != std::string_view::npos &&
         std::ranges::all_of(text, is_part);
}

// Python's dicts take what has a hash; two kinds that have one are not kept here.
void require_key(const Value& key) {
  if (is_one_of(key.kind(), Kind::list, Kind::dict, Kind::set, Kind::bytearray))
    corrupt(std::string(describe(key.kind())) + " as a key of a dict");
  if (key.is(Kind::tensor)) throw Error(ErrorCode::unsupported, "a tensor as a key of a dict");
  if (key.is(Kind::real) && std::isnan(key.as_real()))
    throw Error(ErrorCode::unsupported, "NaN as a key of a dict");
}

}  // namespace

Machine::Machine(ByteView bytes, const ReadOptions& options)
    : cursor_(bytes),
      options_(options),
      cells_(1),
      survey_(bytes),
      skipping_(options.skip.has_value()) {
  if (options.watch != nullptr) cursor_.allow_crossing();
}

Parsed Machine::run() {
  std::size_t at = 0;
  try {
    while (!stopped_) {
      at = cursor_.at();
      options_.watch == nullptr ? step() : watched_step();
    }
    require_one_value();
  } catch (Error& error) {
    error.at_offset(at);
    if (!stopped_ || options_.watch == nullptr) throw;
    options_.watch->refused(error);
  }
  return {stack_.empty() ? Value() : std::move(stack_.back().value), cursor_.at()};
}

void Machine::require_one_value() const {
  if (stack_.empty()) corrupt("the pickle ends without a value");
  if (stack_.size() != 1 || !marks_.empty()) {
    corrupt("the pickle ends with " + std::to_string(stack_.size()) +
            " values on its stack, expected one");
  }
  require_folded(cells_[stack_.front().cell]);
}

void Machine::require_folded(const Cell& cell) const {
  const std::uint64_t most =
      kFreeUnfolding + kMostUnfolding * (kOfNode * values_ + texts_ + steps_);
  if (cell.unfolded <= most) return;
  throw Error(ErrorCode::limit,
              "values that stand in many places unfold to " + std::to_string(cell.unfolded >> 20) +
                  " MiB of values and names, expected at most " + std::to_string(most >> 20));
}

void Machine::step() {
  const std::uint8_t code = cursor_.opcode();
  const auto perform = kSteps[code];
  if (perform == nullptr) corrupt("byte " + std::to_string(code) + " is not an opcode");
  perform(*this, kOpcodes[code]);
}

void Machine::watched_step() {
  const std::size_t at = cursor_.at();
  const Height before{stack_.size(), marks_.size(), floor()};
  try {
    step();
  } catch (Error& error) {
    if (is_one_of(error.code(), ErrorCode::incomplete, ErrorCode::limit)) throw;
    const Op op{std::to_integer<std::uint8_t>(cursor_.byte_at(at))};
    const bool python_ends = is_one_of(op, Op::get, Op::binget, Op::long_binget, Op::put) ||
                             (is_one_of(op, Op::int_text, Op::long_text, Op::real_text) &&
                              !may_be_number(cursor_.line_at(at + 1))) ||
                             op == Op::string || kSteps[static_cast<std::uint8_t>(op)] == nullptr;
    // Python may have the end alone of a line that crosses its frame, and that may be right.
    if (ended_ || (python_ends && !tell_crossing(at))) throw;
    options_.watch->refused(error.at_offset(at));
    go_past(at, before);
  }
  (void)tell_crossing(at);
}

// What Python reads behind an opcode that crosses its frame depends on how it gets the bytes.
bool Machine::tell_crossing(std::size_t at) {
  if (!cursor_.take_crossing()) return false;
  options_.watch->refused(
      Error(ErrorCode::corrupt, "an opcode crosses the end of its frame").at_offset(at));
  return true;
}

void Machine::go_past(std::size_t at, const Height& before) {
  cursor_.jump(at + 1);
  const Opcode& opcode = kOpcodes[std::to_integer<std::uint8_t>(cursor_.byte_at(at))];
  cursor_.skip(opcode.argument);
  std::size_t height = before.stack;
  if (opcode.pops != kToMark) {
    height -= opcode.pops;
  } else {
    marks_.resize(before.marks - 1);
    height = before.floor;
  }
  stack_.resize(height + opcode.pushes);
  std::fill_n(stack_.end() - opcode.pushes, opcode.pushes, Slot{});
}

void Machine::tell(Watch::Use use, const Value& what, const Slot& arguments) const {
  if (options_.watch != nullptr)
    options_.watch->use(use, what, arguments.value, holds_callable(arguments));
}

bool Machine::holds_callable(const Slot& slot) const {
  if (options_.watch == nullptr) return false;
  if (slot.cell != 0) return cells_[slot.cell].callables != 0;
  return slot.value.is(Kind::global) && options_.watch->is_callable(slot.value);
}

void Machine::tell_items(const Value& target, std::size_t first) const {
  if (options_.watch == nullptr) return;
  const bool callables =
      std::any_of(stack_.begin() + static_cast<std::ptrdiff_t>(first), stack_.end(),
                  [this](const Slot& s) { return holds_callable(s); });
  options_.watch->use(Watch::Use::given_items, target, {}, callables);
}

std::uint64_t Machine::signed_size(const char* what) {
  const auto size = cursor_.number<std::int32_t>();
  if (size < 0) corrupt(std::string(what) + " of negative length");
  return static_cast<std::uint64_t>(size);
}

void Machine::push_text(std::string_view text) {
  require_utf8(text);
  push(Value(std::string(text)));
}

void Machine::push_long(ByteView number) {
  push(Value::integer(integer_from_bytes(number)));
}

void Machine::read_protocol() {
  const bool first = cursor_.at() == 1;
  protocol_ = cursor_.number<std::uint8_t>();
  if (!first) corrupt("a protocol number in the middle of the pickle");
  if (protocol_ > kNewestProtocol) {
    throw Error(ErrorCode::unsupported, "pickle protocol " + std::to_string(protocol_) +
                                            ", expected at most " +
                                            std::to_string(kNewestProtocol));
  }
}

void Machine::count_value() {
  if (++values_ > options_.max_nodes) {
    throw Error(ErrorCode::limit,
                "the pickle makes more than " + std::to_string(options_.max_nodes) + " values");
  }
  if (stack_.size() >= options_.max_stack) {
    throw Error(ErrorCode::limit, "the pickle has more than " + std::to_string(options_.max_stack) +
                                      " values on its stack");
  }
}

void Machine::count_copy(const Value& arguments) {
  for (const Value& argument : arguments.items()) {
    copied_ +=
        is_one_of(argument.kind(), Kind::list, Kind::tuple) ? argument.size() : text_of(argument);
  }
  const std::uint64_t most = kFreeCopies + kMostCopies * (values_ + texts_);
  if (copied_ <= most) return;
  throw Error(ErrorCode::limit, "calls copy " + std::to_string(copied_) +
                                    " items and bytes, expected at most " + std::to_string(most));
}

std::uint32_t Machine::new_cell() {
  count_value();
  if (cells_.size() >= kUnset) throw Error(ErrorCode::limit, "more than 2^32 containers");
  cells_.push_back({.depth = 1});
  return static_cast<std::uint32_t>(cells_.size() - 1);
}

void Machine::push(Value value) {
  count_value();
  texts_ += text_of(value);
  stack_.push_back({std::move(value), 0});
}

void Machine::push_container(Value value) {
  stack_.push_back({std::move(value), new_cell()});
}

void Machine::push_slot(Slot slot) {
  count_value();
  if (slot.value.is(Kind::global)) tell(Watch::Use::named, slot.value, {});
  stack_.push_back(std::move(slot));
}

void Machine::require_above_mark(std::size_t count) {
  if (stack_.size() < floor() + count) {
    ended_ = true;
    corrupt("an opcode needs " + std::to_string(count) + " values, the stack has " +
            std::to_string(stack_.size() - floor()));
  }
}

Machine::Slot& Machine::slot_below(std::size_t first, const char* missing) {
  if (first <= floor()) {
    ended_ = true;
    corrupt(missing);
  }
  return stack_[first - 1];
}

Machine::Slot Machine::pop() {
  require_above_mark(1);
  Slot slot = std::move(stack_.back());
  stack_.pop_back();
  return slot;
}

Machine::Slot& Machine::top() {
  require_above_mark(1);
  return stack_.back();
}

void Machine::open_mark() {
  // Every open container has one mark, or two around a batch of items.
  if (marks_.size() > 2 * std::size_t{options_.max_depth}) {
    throw Error(ErrorCode::limit, "more than " + std::to_string(marks_.size()) + " open marks");
  }
  if (skipping_ && may_skip()) {
    skip_list();
  } else {
    marks_.push_back(stack_.size());
  }
}

std::size_t Machine::pop_mark() {
  if (marks_.empty()) {
    ended_ = true;
    corrupt("an opcode needs a mark, the stack has none");
  }
  const std::size_t first = marks_.back();
  marks_.pop_back();
  return first;
}

std::size_t Machine::first_of(const Opcode& opcode) {
  if (opcode.pops == kToMark) return pop_mark();
  require_above_mark(opcode.pops);
  return stack_.size() - opcode.pops;
}

// POP also takes a mark that is on top.
void Machine::drop() {
  if (!marks_.empty() && marks_.back() == stack_.size()) {
    marks_.pop_back();
  } else if (pop().value.is(Kind::object)) {
    throw Error(ErrorCode::unsupported, "the result of a call is made for its effect");
  }
}

void Machine::contain(std::uint32_t parent, const Slot& child) {
  Cell& outer = cells_[parent];
  if (holds_callable(child)) outer.callables = 1;
  if (child.cell == 0) {
    outer.unfolded = saturating_add(outer.unfolded, kOfNode + text_of(child.value));
    return;
  }
  Cell& inner = cells_[child.cell];
  if (child.cell == parent) refuse_cycle();
  inner.contained = 1;
  outer.unfolded = saturating_add(outer.unfolded, inner.unfolded);
  outer.depth = std::max<std::uint32_t>(outer.depth, inner.depth + 1);
  if (outer.depth > options_.max_depth) {
    throw Error(ErrorCode::limit,
                "containers nested deeper than " + std::to_string(options_.max_depth));
  }
}

void Machine::contain_at(std::uint32_t parent, const Slot& child, std::uint64_t step) {
  contain(parent, child);
  steps_ += step;
  Cell& outer = cells_[parent];
  constexpr std::uint64_t kMostLeaves = 0xffffffff;
  const std::uint64_t leaves = std::max<std::uint64_t>(1, cells_[child.cell].leaves);
  outer.leaves = static_cast<std::uint32_t>(std::min(kMostLeaves, outer.leaves + leaves));
  outer.unfolded = saturating_add(outer.unfolded, leaves * step);
}

// A container that is in another one may hold it: changing it could close a cycle. Python's pickler
// finishes every container before the one around it, so only trees with cycles need this.
void Machine::require_changeable(const Slot& slot) const {
  if (slot.cell == 0 || cells_[slot.cell].contained) refuse_cycle();
}

void Machine::push_sequence(std::size_t first, Value (*make)(Value::List items)) {
  const std::uint32_t cell = new_cell();
  Value::List items;
  items.reserve(stack_.size() - first);
  move_items(first, cell, items, make == &Value::list);
  stack_.push_back({make(std::move(items)), cell});
}

void Machine::move_items(std::size_t first, std::uint32_t cell, Value::List& items, bool list) {
  for (std::size_t i = first; i < stack_.size(); ++i) {
    if (list) {
      contain_at(cell, stack_[i], kOfStep + kOfIndex);
    } else {
      contain(cell, stack_[i]);
    }
    items.push_back(std::move(stack_[i].value));
  }
  stack_.resize(first);
}

void Machine::push_dict(std::size_t first) {
  stack_.insert(stack_.begin() + static_cast<std::ptrdiff_t>(first), {Value::dict(), new_cell()});
  set_items(first + 1);
}

void Machine::append(const Opcode& opcode) {
  const std::size_t first = first_of(opcode);
  Slot& target = slot_below(first, "items without a list");
  const bool object = target.value.is(Kind::object);
  if (!target.value.is(Kind::list)) tell_items(target.value, first);
  if (!object && !target.value.is(Kind::list)) {
    corrupt("items are appended to " + std::string(describe(target.value.kind())));
  }
  if (first == stack_.size()) return;
  require_changeable(target);
  auto& items = object ? target.value.as_object().list_items : target.value.items();
  move_items(first, target.cell, items, !object);
  if (object) cells_[target.cell].callables = 0;
}

void Machine::add_to_set(std::size_t first) {
  Slot& target = slot_below(first, "items without a set");
  if (!target.value.is(Kind::set)) {
    tell_items(target.value, first);
    corrupt("items without a set");
  }
  if (first == stack_.size()) return;
  require_changeable(target);
  move_items(first, target.cell, target.value.items(), false);
}

void Machine::set_items(std::size_t first) {
  Slot& target = slot_below(first, "pairs without a dict");
  if (!target.value.is(Kind::dict)) tell_items(target.value, first);
  if ((stack_.size() - first) % 2 != 0) corrupt("a key without a value");
  if (!is_one_of(target.value.kind(), Kind::dict, Kind::object)) {
    corrupt("pairs are set in " + std::string(describe(target.value.kind())));
  }
  if (first == stack_.size()) return;
  require_changeable(target);
  for (std::size_t i = first; i < stack_.size(); i += 2) {
    set_item(target, std::move(stack_[i]), std::move(stack_[i + 1]));
  }
  stack_.resize(first);
}

void Machine::set_item(Slot& target, Slot key, Slot value) {
  contain(target.cell, key);
  if (target.value.is(Kind::object)) {
    contain(target.cell, value);
    cells_[target.cell].callables = 0;
    auto& items = target.value.as_object().dict_items;
    items.emplace_back(std::move(key.value), std::move(value.value));
    return;
  }
  contain_at(target.cell, value, bytes_of_step(key.value));
  require_key(key.value);
  const std::size_t before = target.value.size();
  const Value kept = key.value;
  target.value.set_item(std::move(key.value), std::move(value.value));
  if (target.value.size() == before) {
    corrupt("a dict has a key twice: " + render(kept, 60));
  }
}

void Machine::memoize_next() {
  if (!skipped_.empty()) read_skipped();
  memoize(memo_size_);
}

void Machine::memoize(std::uint64_t index) {
  if (index < memo_end_ && !skipped_.empty()) read_skipped();
  memo_end_ = std::max(memo_end_, saturating_add(index, 1));
  const Slot& slot = top();
  if (is_first_put(index)) count_entry();
  if (survey_.is_recalled(index)) memo_.insert_or_assign(index, slot);
}

bool Machine::is_first_put(std::uint64_t index) {
  // Picklers count up; any other index has no claim to memory of its own size.
  if (index > put_.size() + 1) return sparse_put_.insert(index).second;
  if (index >= put_.size()) put_.resize(index + 1);
  const bool first = !put_[index] && !sparse_put_.contains(index);
  put_[index] = true;
  return first;
}

// A pickler numbers a value once: a memo that is larger than all values is there to fill memory.
void Machine::count_entry() {
  if (++memo_size_ > (options_.watch == nullptr ? values_ : options_.max_nodes)) {
    throw Error(ErrorCode::limit, "the pickle numbers " + std::to_string(memo_size_) +
                                      " values and makes " + std::to_string(values_));
  }
}

void Machine::recall(std::uint64_t index) {
  const Slot* slot = memo_entry(index);
  if (slot == nullptr && !skipped_.empty()) {
    read_skipped();
    slot = memo_entry(index);
  }
  if (slot == nullptr)
    corrupt("memo entry " + std::to_string(index) + " is used and was never set");
  push_slot(*slot);
}

const Machine::Slot* Machine::memo_entry(std::uint64_t index) const {
  const auto found = memo_.find(index);
  return found == memo_.end() ? nullptr : &found->second;
}

}  // namespace tessera::pickle
