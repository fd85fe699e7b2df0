// The stack machine that a pickle is a program for, with values instead of Python objects.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "format/pickle/cursor.h"
#include "format/pickle/opcodes.h"
#include "format/pickle/pickle.h"
#include "format/pickle/steps.h"

namespace tessera::pickle {

[[noreturn]] void corrupt(std::string what);

class Machine {
 public:
  Machine(ByteView bytes, const ReadOptions& options);
  // Runs to STOP.
  [[nodiscard]] Parsed run();

 private:
  // What a container is known to be, beside its value. Index 0 stands for all values that hold
  // nothing.
  struct Cell {
    std::uint32_t depth : 30 = 0;     // of containers, this one included
    std::uint32_t contained : 1 = 0;  // in another, or otherwise not to be changed any more
    std::uint32_t callables : 1 = 0;  // with a watch: a function or class lies somewhere in it
    std::uint32_t leaves = 0;  // that flattening makes of what is in it; it may be one itself
    std::uint64_t unfolded = kOfNode;  // bytes, about: of a walk without a memo, see require_folded
  };
  struct Slot {
    Value value;
    std::uint32_t cell = 0;
  };
  using Slots = std::vector<Slot>;
  static constexpr std::uint64_t kOfNode = 100;  // bytes: a value, or a leaf without its name

  // What each opcode does (steps.h, steps.cpp), by its byte; null: no opcode.
  using MachineSteps = Steps<Machine, void>;
  friend MachineSteps;
  static const std::array<MachineSteps::Step, 256> kSteps;
  void step();  // the opcode at the cursor
  // The same; what it refuses and Python might take is told to the watch, and it goes on behind it.
  void watched_step();
  bool tell_crossing(std::size_t at);  // false: the opcode does not
  struct Height {
    std::size_t stack = 0;
    std::size_t marks = 0;
    std::size_t floor = 0;
  };
  // Behind the opcode at `at`, with what it leaves on a stack that had this height before.
  void go_past(std::size_t at, const Height& before);
  void tell(Watch::Use use, const Value& what, const Slot& arguments) const;
  // Whether it is a function or class, or a plain container that holds one. What a call gave is
  // neither: the watch has judged the call.
  [[nodiscard]] bool holds_callable(const Slot& slot) const;
  // Tells of items, from `first` on, for a target that is no container of Python's own.
  void tell_items(const Value& target, std::size_t first) const;

  // Arguments.
  [[nodiscard]] std::uint64_t signed_size(const char* what);  // a length; refuses a negative one
  void push_bool(bool value) { push(Value(value)); }
  void push_integer(std::int64_t value) { push(Value(value)); }
  void push_text(std::string_view text);
  void push_long(ByteView number);
  void enter_frame(std::uint64_t size) { cursor_.enter_frame(size); }
  void read_protocol();

  // Stack.
  void push(Value value);            // something that holds nothing
  void push_container(Value value);  // an empty container
  void push_empty_list() { push_container(Value::list()); }
  void push_empty_dict() { push_container(Value::dict()); }
  void push_slot(Slot slot);
  Slot pop();
  Slot& top();
  void open_mark();
  std::size_t pop_mark();  // index of the first slot above the topmost mark
  // Index of the first slot that an opcode takes; a mark that is taken too is gone.
  std::size_t first_of(const Opcode& opcode);
  void drop();
  void require_above_mark(std::size_t count);
  void require_one_value() const;  // at the end
  void require_folded(const Cell& cell) const;
  // Height of the topmost mark.
  [[nodiscard]] std::size_t floor() const { return marks_.empty() ? 0 : marks_.back(); }
  // The slot below `first`; throws `corrupt`, saying `missing`, when a mark is there.
  Slot& slot_below(std::size_t first, const char* missing);

  // Containers.
  void contain(std::uint32_t parent, const Slot& child);
  // The same for a dict or list, which flattening opens: each leaf below is named by this step too.
  void contain_at(std::uint32_t parent, const Slot& child, std::uint64_t step);
  void require_changeable(const Slot& slot) const;
  // All slots from `first` become `items` of the container of this cell, which is a list or not.
  void move_items(std::size_t first, std::uint32_t cell, Value::List& items, bool list);
  // Makes one of all slots from `first`.
  void push_sequence(std::size_t first, Value (*make)(Value::List items));
  void push_tuple(const Opcode& opcode) { push_sequence(first_of(opcode), Value::tuple); }
  void push_dict(std::size_t first);
  void append(const Opcode& opcode);
  void add_to_set(std::size_t first);
  void set_items(const Opcode& opcode) { set_items(first_of(opcode)); }
  void set_items(std::size_t first);  // of the slot below `first`
  void set_item(Slot& target, Slot key, Slot value);

  // Memo.
  void memoize_next();
  void memoize(std::uint64_t index);
  [[nodiscard]] bool is_first_put(std::uint64_t index);
  void count_entry();
  void recall(std::uint64_t index);
  [[nodiscard]] const Slot* memo_entry(std::uint64_t index) const;  // null: never put, or recalled

  // Skipped lists (skip.cpp).
  struct Region {
    std::size_t begin = 0;  // of the MARK before the items, up to the end of their APPENDS
    std::size_t end = 0;
  };
  [[nodiscard]] bool may_skip() const;
  // Whether a skipped list may refer to this memo entry.
  [[nodiscard]] bool is_harmless(std::uint64_t index) const;
  void skip_list();
  void read_skipped();

  // Objects.
  void push_global();
  void push_stack_global();
  void push_name(Value module, Value name);
  void push_extension(std::uint64_t number);
  void make_instance(bool class_follows);
  void reduce();
  void new_object(bool with_keywords = false);
  void build();
  void build_object(Slot& target, Slot state);
  void load_persistent(const Slot& id);
  void load_persistent_text();
  void require_callable(const Value& callable) const;
  void require_harmless_call(const Value& callable, const Value& arguments) const;
  // Result of `callable(*arguments)` for a name of the closed table; false: not in the table.
  bool reduce_known(const Slot& callable, const Slot& arguments, Slot& result);
  Slot ordered_dict_of(const Slot& arguments);
  void count_value();
  // Before a known call copies its argument: a shared one is copied for a few opcodes each time.
  void count_copy(const Value& arguments);
  std::uint32_t new_cell();

  Cursor cursor_;
  const ReadOptions& options_;
  int protocol_ = 0;
  std::uint64_t values_ = 0;
  // Bytes, each as often as the pickle has them.
  std::uint64_t texts_ = 0;
  std::uint64_t steps_ = 0;
  std::uint64_t copied_ = 0;  // items and bytes that known calls copied
  bool stopped_ = false;
  bool ended_ = false;  // an opcode was refused for what ends Python's reading too
  Slots stack_;
  std::vector<std::size_t> marks_;  // heights of the stack
  std::deque<Cell> cells_;          // does not move while it grows
  const Survey survey_;
  std::unordered_map<std::uint64_t, Slot> memo_;  // of entries that are recalled
  std::vector<bool> put_;                         // dense indices
  std::unordered_set<std::uint64_t> sparse_put_;
  std::size_t memo_size_ = 0;
  std::uint64_t memo_end_ = 0;   // above every index that was ever put
  bool skipping_ = false;        // lists of options_.skip are skipped
  std::vector<Region> skipped_;  // whose memo entries have not been made, in order
  static constexpr std::uint32_t kUnset = 0xffffffff;
};

}  // namespace tessera::pickle
