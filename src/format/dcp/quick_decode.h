// A pickle machine for `.metadata` alone: small values by number, records for what there is most
// of.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "format/dcp/chunks.h"
#include "format/dcp/dcp.h"
#include "format/pickle/cursor.h"
#include "format/pickle/opcodes.h"
#include "format/pickle/steps.h"
#include "tessera/io.h"

namespace tessera::dcp {

// The classes and functions that a `.metadata` names.
enum class Name : std::uint8_t {
  metadata,
  tensor,
  bytes,
  chunk,
  properties,
  index,
  storage_info,
  storage_meta,
  size,
  layout,
  memory_format,
  memory_member,  // a memory format by its name
  getattr,        // of nothing but memory formats
  path,
  torch_name,  // a dtype, by its text
};

// The attributes of what there is most of.
enum class Key : std::uint8_t {
  other,
  offsets,
  sizes,
  fqn,
  offset,
  index,
  relative_path,
  length,
  transforms,
};

// A value. `number` is itself, an index into one of the machine's arenas, or where a text begins.
struct Lite {
  enum class Kind : std::uint8_t {
    none,
    boolean,
    integer,
    text,    // `count` bytes of the pickle from `number` on
    name,    // `count`: a Name; torch_name: `number` is where its text begins in `torch_names`
    tuple,   // `count` items of `items` from `number` on
    size,    // `count` integers of `dims` from `number` on
    list,    // of `lists`; `count` of a container says whether it is complete
    dict,    // of `dicts`: keys and values in turns
    object,  // of `objects`
    chunk,   // of `chunks`
    index,   // of `indices`
    info,    // of `infos`
  };
  Kind kind = Kind::none;
  Key key = Key::other;  // of a text: which attribute it names
  std::uint32_t count = 0;
  std::uint64_t number = 0;
};

using LiteKind = Lite::Kind;

class QuickMachine {
 public:
  struct Object {
    Name name;
    Lite arguments;
    Lite state;
    bool has_state = false;
    bool wanted = false;  // the memo gives it out again
  };
  struct Dict {
    std::vector<Lite> pairs;
    bool wanted = false;
  };
  // Chunks become columns at once, so a list has either.
  struct List {
    std::vector<Lite> items;
    Chunks chunks;
  };
  struct Chunk {
    Lite offsets;  // both sizes
    Lite sizes;
  };
  struct Index {
    Lite name;    // a text
    Lite offset;  // a size or none
    Lite hint;    // an integer or none
  };
  struct Info {
    Lite path;  // a text
    std::uint64_t offset;
    std::uint64_t length;
    Lite transforms;  // a list or tuple, or none
  };

  explicit QuickMachine(ByteView bytes) : bytes_(bytes), cursor_(bytes), survey_(bytes) {}

  // Takes members of a dict whose keys are indices: keys and values in turns, and the dict's
  // number. The dict does not keep them. False: that was not expected.
  std::function<bool(std::uint64_t dict, std::span<const Lite> pairs)> take_items;

  // The pickle's value, or nullopt at the first thing that is not expected. May throw an Error
  // instead.
  [[nodiscard]] std::optional<Lite> run();

  [[nodiscard]] std::string_view text(const Lite& lite) const {
    return {reinterpret_cast<const char*>(bytes_.data()) + lite.number, lite.count};
  }

  // The value that stands on the stack behind this text, where a dict is not complete yet. Null:
  // none.
  [[nodiscard]] const Lite* find_on_stack(std::string_view key) const;
  [[nodiscard]] std::span<const std::int64_t> numbers(const Lite& size) const {
    return std::span(dims).subspan(size.number, size.count);
  }
  // The items of a tuple or list.
  [[nodiscard]] std::vector<Lite> items_of(const Lite& lite) const;
  // The value of a key in a dict; null: absent.
  [[nodiscard]] const Lite* find(const Lite& dict, std::string_view key) const;
  // Whether all dicts, also those that nobody looks at, have each key once. They have texts as
  // keys.
  [[nodiscard]] bool has_each_key_once() const;

  std::vector<std::string_view> torch_names;
  std::vector<std::int64_t> dims;
  std::vector<Lite> items;
  std::vector<List> lists;
  std::vector<Dict> dicts;
  std::vector<Object> objects;
  std::vector<Chunk> chunks;
  std::vector<Index> indices;
  std::vector<Info> infos;

 private:
  using Op = pickle::Op;

  // What each opcode does; false: that was not expected, or nothing here knows the opcode.
  using QuickSteps = pickle::Steps<QuickMachine, bool>;
  friend QuickSteps;
  static const std::array<QuickSteps::Step, 256> kSteps;

  // How long the stack and the arenas were when a mark was set.
  struct Mark {
    std::size_t stack;
    std::size_t dims;
    std::size_t lists;
    std::size_t chunks;
    std::size_t indices;
    std::size_t infos;
    std::size_t kept_containers;
  };

  bool read_protocol();
  bool enter_frame(std::uint64_t size);
  bool open_mark();

  bool push(Lite value);
  bool push_bool(bool value) {
    return push({.kind = Lite::Kind::boolean, .number = value ? 1U : 0U});
  }
  bool push_integer(std::int64_t value);
  bool push_long(ByteView bytes);
  bool push_text(std::string_view text);
  bool push_empty_list();
  bool push_empty_dict();
  bool push_tuple(const pickle::Opcode& opcode);
  // Index of the first value that an opcode takes, and that a target is below it.
  bool first_of(const pickle::Opcode& opcode, std::size_t& first);
  bool append(const pickle::Opcode& opcode);
  bool append_chunks(List& list, std::size_t first);
  bool set_items(const pickle::Opcode& opcode);
  bool hand_out(std::uint64_t dict, std::size_t first);
  [[nodiscard]] bool all_are(std::size_t first, std::size_t step, Lite::Kind kind) const;
  void forget_batch(const pickle::Opcode& opcode);
  bool memoize_next();
  bool memoize(std::uint64_t index) { return index == memo_size_ && memoize_next(); }
  bool drop();
  void keep(const Lite& value);
  bool recall(std::uint64_t index);
  [[nodiscard]] bool is_on_stack(const Lite& value) const;
  bool push_global();
  bool push_stack_global();
  bool push_name(std::string_view module, std::string_view name);
  bool new_object() { return make(true); }
  bool reduce() { return make(false); }
  bool make(bool by_new);
  bool make_object(Name name, const Lite& arguments);
  bool make_size(const Lite& arguments);
  void forget_size(const Lite& arguments, const Lite& numbers);
  [[nodiscard]] bool is_member(const Lite& arguments) const;
  bool build();
  bool replace_by_record(const Lite& target, const Lite& state);
  bool build_record(const Object& object, const Lite& state, Lite& record);
  // An attribute of a record: what its value may be, and whether it must be there.
  struct Field {
    Key key;
    bool (*takes)(const Lite& value);
    bool required;
  };
  // The values of a record's attributes, in the order of `fields`; false: one is missing, there
  // twice, not known, or not what it may be.
  template <std::size_t count>
  bool read_fields(const Dict& dict, const std::array<Field, count>& fields,
                   std::array<Lite, count>& values) const;
  bool build_chunk(const Dict& dict, Lite& record);
  bool build_index(const Dict& dict, Lite& record);
  bool build_info(const Dict& dict, Lite& record);
  void forget(const Lite& object, const Lite& state);
  // The number of values above the topmost mark.
  [[nodiscard]] std::size_t above_mark() const {
    return stack_.size() - (marks_.empty() ? 0 : marks_.back().stack);
  }

  ByteView bytes_;
  pickle::Cursor cursor_;
  std::vector<Lite> stack_;
  std::vector<Mark> marks_;
  Mark since_{};  // the mark that was used last
  const pickle::Survey survey_;
  std::vector<Lite> memo_;  // of entries that are recalled alone, in order
  std::uint64_t memo_size_ = 0;
  std::uint64_t pushed_ = 0;  // values, so far
  std::uint8_t protocol_ = 0;
  std::size_t kept_items_ = 0;  // items below are wanted
  std::size_t kept_dims_ = 0;   // and dims
  std::size_t kept_containers_ = 0;
  std::size_t open_dicts_ = 0;  // of `dicts`; those behind wait to be used again
};

// Reads a `.metadata` as PyTorch's pickler lays it out, without a value for each of its parts.
//
// A checkpoint of a large job has a million chunks, each of which is some seventy opcodes and a
// dozen Python objects. Here each becomes one record as soon as its object is complete, and a batch
// of records a part of the result: beside it there is memory for one batch, and for what the
// pickle's memo gives out again.

// The same as decode_values(), or nullopt for whatever is not laid out as expected: unusual
// opcodes, other classes, anything that is wrong. Never throws for what is in `bytes`.
[[nodiscard]] std::optional<Metadata> quick_decode(ByteView bytes);

// decode() by values alone: reads everything that can be read and says what is wrong.
[[nodiscard]] Metadata decode_values(ByteView bytes);

}  // namespace tessera::dcp
