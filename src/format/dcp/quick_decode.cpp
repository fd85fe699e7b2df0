#include "format/dcp/quick_decode.h"

#include <algorithm>
#include <array>
#include <span>
#include <unordered_set>
#include <utility>

#include "base/text.h"
#include "format/dcp/assemble.h"
#include "tessera/error.h"

namespace tessera::dcp {

// What a `.metadata` has most of: chunks, indices and places become records, and batches of them
// are handed on.

namespace {

bool is_text(const Lite& value) {
  return value.kind == LiteKind::text;
}

bool is_size(const Lite& value) {
  return value.kind == LiteKind::size;
}

bool is_count(const Lite& value) {
  return value.kind == LiteKind::integer && static_cast<std::int64_t>(value.number) >= 0;
}

// Classes without a value for an attribute leave it out, or say None.
bool may_be_size(const Lite& value) {
  return is_one_of(value.kind, LiteKind::none, LiteKind::size);
}

bool may_be_integer(const Lite& value) {
  return is_one_of(value.kind, LiteKind::none, LiteKind::integer);
}

bool may_be_items(const Lite& value) {
  return is_one_of(value.kind, LiteKind::none, LiteKind::list, LiteKind::tuple);
}

}  // namespace

// What there is most of becomes a record as soon as it is complete.
bool QuickMachine::replace_by_record(const Lite& target, const Lite& state) {
  const Object& object = objects[target.number];
  Lite record;
  if (object.wanted || !build_record(object, state, record)) return false;
  forget(target, state);
  stack_.back() = record;
  return true;
}

bool QuickMachine::build_record(const Object& object, const Lite& state, Lite& record) {
  if (state.kind != LiteKind::dict || object.arguments.count != 0) return false;
  const Dict& dict = dicts[state.number];
  // A dict that is in the memo could still be changed.
  if (dict.wanted) return false;
  if (object.name == Name::chunk) return build_chunk(dict, record);
  return object.name == Name::index ? build_index(dict, record) : build_info(dict, record);
}

// Gives back the places of an object that became a record and of its state.
void QuickMachine::forget(const Lite& object, const Lite& state) {
  if (object.number + 1 == objects.size()) objects.pop_back();
  if (state.number + 1 != open_dicts_) return;
  dicts[state.number].pairs.clear();
  --open_dicts_;
}

template <std::size_t count>
bool QuickMachine::read_fields(const Dict& dict, const std::array<Field, count>& fields,
                               std::array<Lite, count>& values) const {
  std::array<bool, count> seen{};
  for (std::size_t i = 0; i + 1 < dict.pairs.size(); i += 2) {
    const auto* field = std::ranges::find(fields, dict.pairs[i].key, &Field::key);
    const auto place = static_cast<std::size_t>(field - fields.begin());
    if (place == count || seen[place] || !field->takes(dict.pairs[i + 1])) return false;
    seen[place] = true;
    values[place] = dict.pairs[i + 1];
  }
  for (std::size_t place = 0; place < count; ++place) {
    if (fields[place].required && !seen[place]) return false;
  }
  return true;
}

bool QuickMachine::build_chunk(const Dict& dict, Lite& record) {
  constexpr std::array<Field, 2> kFields{
      {{Key::offsets, is_size, true}, {Key::sizes, is_size, true}}};
  std::array<Lite, 2> values;
  if (!read_fields(dict, kFields, values)) return false;
  record = {.kind = LiteKind::chunk, .number = chunks.size()};
  chunks.push_back({.offsets = values[0], .sizes = values[1]});
  return true;
}

bool QuickMachine::build_index(const Dict& dict, Lite& record) {
  constexpr std::array<Field, 3> kFields{{{Key::fqn, is_text, true},
                                          {Key::offset, may_be_size, false},
                                          {Key::index, may_be_integer, false}}};
  std::array<Lite, 3> values;
  if (!read_fields(dict, kFields, values)) return false;
  record = {.kind = LiteKind::index, .number = indices.size()};
  indices.push_back({.name = values[0], .offset = values[1], .hint = values[2]});
  return true;
}

bool QuickMachine::build_info(const Dict& dict, Lite& record) {
  constexpr std::array<Field, 4> kFields{{{Key::relative_path, is_text, true},
                                          {Key::offset, is_count, true},
                                          {Key::length, is_count, true},
                                          {Key::transforms, may_be_items, false}}};
  std::array<Lite, 4> values;
  if (!read_fields(dict, kFields, values)) return false;
  record = {.kind = LiteKind::info, .number = infos.size()};
  infos.push_back({.path = values[0],
                   .offset = values[1].number,
                   .length = values[2].number,
                   .transforms = values[3]});
  return true;
}

bool QuickMachine::all_are(std::size_t first, std::size_t step, LiteKind kind) const {
  for (std::size_t i = first; i < stack_.size(); i += step) {
    if (stack_[i].kind != kind) return false;
  }
  return true;
}

bool QuickMachine::append_chunks(List& list, std::size_t first) {
  if (!list.items.empty() || !all_are(first, 1, LiteKind::chunk)) return false;
  for (std::size_t i = first; i < stack_.size(); ++i) {
    const Chunk& chunk = chunks[stack_[i].number];
    list.chunks.push_back(numbers(chunk.offsets), numbers(chunk.sizes));
  }
  return true;
}

bool QuickMachine::hand_out(std::uint64_t dict, std::size_t first) {
  return dicts[dict].pairs.empty() && all_are(first, 2, LiteKind::index) &&
         all_are(first + 1, 2, LiteKind::info) &&
         take_items(dict, std::span(stack_).subspan(first));
}

// Gives back what records of one batch have used, which nobody but they and the memo refer to.
// Containers that the memo gives out again might refer to it, too.
void QuickMachine::forget_batch(const pickle::Opcode& opcode) {
  if (opcode.pops != pickle::kToMark || since_.kept_containers != kept_containers_) return;
  dims.resize(std::max(since_.dims, kept_dims_));
  lists.resize(since_.lists);
  chunks.resize(since_.chunks);
  indices.resize(since_.indices);
  infos.resize(since_.infos);
}

namespace {

// Every function answers false for what is not laid out as expected.
class QuickDecoder {
 public:
  explicit QuickDecoder(ByteView bytes) : machine_(bytes) {
    machine_.take_items = [this](std::uint64_t dict, std::span<const Lite> pairs) {
      return take_items(dict, pairs);
    };
  }

  std::optional<Metadata> run() {
    const std::optional<Lite> root = machine_.run();
    Lite state;
    if (!root || !state_of(*root, Name::metadata, LiteKind::dict, state)) return std::nullopt;
    if (!read_parts(state) || !machine_.has_each_key_once()) return std::nullopt;
    Metadata metadata = assembler_.finish();
    if (!read_origin(state, metadata)) return std::nullopt;
    return metadata;
  }

 private:
  // All that the assembler puts together. The items and, before them, the entries are there
  // already, unless there are no items.
  bool read_parts(const Lite& state) {
    const Lite* entries = find(state, "state_dict_metadata");
    if (!items_ && !read_entries(entries)) return false;
    return is_complete(entries) && read_paths(find(state, "planner_data")) &&
           are_items(find(state, "storage_data"));
  }

  // What wrote the checkpoint, and where.
  bool read_origin(const Lite& state, Metadata& metadata) {
    return text_or_none(find(state, "version"), metadata.version) &&
           read_storage_meta(find(state, "storage_meta"), metadata);
  }

  const Lite* find(const Lite& dict, std::string_view key) const {
    return machine_.find(dict, key);
  }

  bool is_object(const Lite& value, Name name) const {
    return value.kind == LiteKind::object && machine_.objects[value.number].name == name;
  }

  static bool is_name(const Lite& value, Name name) {
    return value.kind == LiteKind::name && Name{static_cast<std::uint8_t>(value.count)} == name;
  }

  // A value that is null is absent.
  static bool is(const Lite* value, LiteKind kind) {
    return value != nullptr && value->kind == kind;
  }
  static bool is_none(const Lite* value) {
    return value == nullptr || value->kind == LiteKind::none;
  }

  // The state of an instance: as a rule, the dict of its attributes.
  bool state_of(const Lite& value, Name name, LiteKind kind, Lite& state) const {
    if (!is_object(value, name)) return false;
    const auto& object = machine_.objects[value.number];
    state = object.state;
    return object.has_state && state.kind == kind;
  }

  [[nodiscard]] std::string text(const Lite& value) const {
    return std::string(machine_.text(value));
  }

  bool text_or_none(const Lite* value, std::string& out) const {
    if (is_none(value)) return true;
    if (value->kind != LiteKind::text) return false;
    out = text(*value);
    return true;
  }

  bool read_entries(const Lite* dict) {
    if (!is(dict, LiteKind::dict)) return false;
    const auto& pairs = machine_.dicts[dict->number].pairs;
    entries_ = Part{dict->number, pairs.size()};
    assembler_.metadata.entries.reserve(pairs.size() / 2);
    for (std::size_t i = 0; i + 1 < pairs.size(); i += 2) {
      if (!read_entry(pairs[i], pairs[i + 1])) return false;
    }
    return true;
  }

  // Whether this is the dict of the entries that were read, and nothing joined it since.
  bool is_complete(const Lite* dict) const {
    return is(dict, LiteKind::dict) && entries_ && dict->number == entries_->number &&
           machine_.dicts[dict->number].pairs.size() == entries_->size;
  }

  bool read_entry(const Lite& name, const Lite& value) {
    Entry entry;
    entry.name = text(name);
    if (!is_object(value, Name::bytes) && !read_tensor(value, entry)) return false;
    assembler_.add_entry(std::move(entry));
    return true;
  }

  bool read_tensor(const Lite& value, Entry& entry) {
    Lite state;
    if (!state_of(value, Name::tensor, LiteKind::dict, state)) return false;
    const Lite* size = find(state, "size");
    const Lite* properties = find(state, "properties");
    if (!is(size, LiteKind::size) || !is(properties, LiteKind::object)) return false;
    entry.is_tensor = true;
    const auto shape = machine_.numbers(*size);
    entry.shape = {shape.begin(), shape.end()};
    return read_properties(*properties, entry) && read_chunks(find(state, "chunks"), entry);
  }

  bool read_chunks(const Lite* list, Entry& entry) {
    if (!is(list, LiteKind::list) || !machine_.lists[list->number].items.empty()) return false;
    if (!lists_.insert(list->number).second) return false;
    Chunks& chunks = machine_.lists[list->number].chunks;
    for (std::size_t i = 0; i < chunks.size(); ++i)
      require_chunk_inside(entry, chunks.box_offsets(i), chunks.box_sizes(i));
    entry.chunks = std::move(chunks);
    return true;
  }

  bool read_properties(const Lite& value, Entry& entry) const {
    Lite state;
    if (!state_of(value, Name::properties, LiteKind::tuple, state)) return false;
    const std::vector<Lite> fields = machine_.items_of(state);
    if (!is_one_of(fields.size(), 5U, 6U)) return false;
    if (!is_name(fields[0], Name::torch_name) || fields[2].kind != LiteKind::boolean) return false;
    entry.dtype = dtype_from_torch(std::string(machine_.torch_names[fields[0].number]));
    entry.requires_grad = fields[2].number != 0;
    return is_memory_format(fields[3]);
  }

  bool is_memory_format(const Lite& value) const {
    if (is_name(value, Name::memory_member) || is_object(value, Name::getattr)) return true;
    return is_object(value, Name::memory_format) &&
           is_memory_format_number(machine_.items_of(machine_.objects[value.number].arguments));
  }

  static bool is_memory_format_number(const std::vector<Lite>& arguments) {
    return arguments.size() == 1 && arguments[0].kind == LiteKind::integer &&
           arguments[0].number <= static_cast<std::uint64_t>(kLastMemoryFormat);
  }

  bool read_paths(const Lite* planner_data) {
    const bool has_paths = is(planner_data, LiteKind::dict);
    assembler_.metadata.has_planner_data = has_paths;
    if (!has_paths) return is_none(planner_data);
    const auto& pairs = machine_.dicts[planner_data->number].pairs;
    for (std::size_t i = 0; i + 1 < pairs.size(); i += 2) {
      Path path;
      if (!read_path(pairs[i + 1], path)) return false;
      assembler_.set_path(machine_.text(pairs[i]), std::move(path));
    }
    return true;
  }

  bool read_path(const Lite& parts, Path& path) const {
    if (!is_one_of(parts.kind, LiteKind::tuple, LiteKind::list)) return false;
    for (const Lite& part : machine_.items_of(parts)) {
      if (part.kind == LiteKind::text) {
        path.emplace_back(text(part));
      } else if (part.kind == LiteKind::integer) {
        path.emplace_back(static_cast<std::int64_t>(part.number));
      } else {
        return false;
      }
    }
    return true;
  }

  // Items as the machine meets them. Entries stand before them in a `.metadata`.
  bool take_items(std::uint64_t dict, std::span<const Lite> pairs) {
    if (!items_ && !read_entries(machine_.find_on_stack("state_dict_metadata"))) return false;
    if (!items_) items_ = dict;
    if (dict != *items_) return false;
    for (std::size_t i = 0; i < pairs.size(); i += 2) {
      if (!take_item(machine_.indices[pairs[i].number], machine_.infos[pairs[i + 1].number]))
        return false;
    }
    return true;
  }

  bool take_item(const QuickMachine::Index& index, const QuickMachine::Info& info) {
    std::vector<std::string> transforms;
    if (info.transforms.kind != LiteKind::none && !read_texts(info.transforms, transforms))
      return false;
    assembler_.add_item(machine_.text(index.name), place_of(index),
                        {machine_.text(info.path), info.offset, info.length, transforms});
    return true;
  }

  // Whether this is the dict whose items were taken, and it has no other members.
  bool are_items(const Lite* dict) const {
    return is(dict, LiteKind::dict) && machine_.dicts[dict->number].pairs.empty() &&
           (!items_ || dict->number == *items_);
  }

  bool read_texts(const Lite& list, std::vector<std::string>& out) const {
    for (const Lite& item : machine_.items_of(list)) {
      if (item.kind != LiteKind::text) return false;
      out.push_back(text(item));
    }
    return true;
  }

  [[nodiscard]] Assembler::Index place_of(const QuickMachine::Index& index) const {
    Assembler::Index place;
    if (index.offset.kind == LiteKind::size) place.offset = machine_.numbers(index.offset);
    if (index.hint.kind == LiteKind::integer)
      place.hint = static_cast<std::int64_t>(index.hint.number);
    return place;
  }

  bool read_storage_meta(const Lite* value, Metadata& metadata) {
    if (is_none(value)) return true;
    Lite state;
    if (!state_of(*value, Name::storage_meta, LiteKind::dict, state)) return false;
    const Lite* id = find(state, "checkpoint_id");
    const bool read = is(id, LiteKind::object) ? path_text(*id, metadata.checkpoint_id)
                                               : text_or_none(id, metadata.checkpoint_id);
    return read && text_or_none(find(state, "save_id"), metadata.save_id);
  }

  // pathlib.PosixPath("/", "a", "b").
  bool path_text(const Lite& value, std::string& out) const {
    if (!is_object(value, Name::path)) return false;
    for (const Lite& part : machine_.items_of(machine_.objects[value.number].arguments)) {
      if (part.kind != LiteKind::text) return false;
      append_path_part(out, machine_.text(part));
    }
    return true;
  }

  // A dict, and how many keys and values it had.
  struct Part {
    std::uint64_t number;
    std::size_t size;
  };

  QuickMachine machine_;
  Assembler assembler_;
  std::optional<Part> entries_;              // what was read of them
  std::optional<std::uint64_t> items_;       // the dict that they are taken from
  std::unordered_set<std::uint64_t> lists_;  // whose chunks an entry has
};

}  // namespace

std::optional<Metadata> quick_decode(ByteView bytes) {
  try {
    return QuickDecoder(bytes).run();
  } catch (const Error&) {
    return std::nullopt;  // decode_values says what is wrong
  }
}

}  // namespace tessera::dcp
