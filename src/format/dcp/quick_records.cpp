// What a `.metadata` has most of: chunks, indices and places become records, and batches of them
// are handed on.
#include <algorithm>
#include <array>

#include "base/one_of.h"
#include "format/dcp/quick_machine.h"

namespace tessera::dcp {
namespace {

using Kind = Lite::Kind;

bool is_text(const Lite& value) {
  return value.kind == Kind::text;
}

bool is_size(const Lite& value) {
  return value.kind == Kind::size;
}

bool is_count(const Lite& value) {
  return value.kind == Kind::integer && static_cast<std::int64_t>(value.number) >= 0;
}

// Classes without a value for an attribute leave it out, or say None.
bool may_be_size(const Lite& value) {
  return is_one_of(value.kind, Kind::none, Kind::size);
}

bool may_be_integer(const Lite& value) {
  return is_one_of(value.kind, Kind::none, Kind::integer);
}

bool may_be_items(const Lite& value) {
  return is_one_of(value.kind, Kind::none, Kind::list, Kind::tuple);
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
  if (state.kind != Kind::dict || object.arguments.count != 0) return false;
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
  record = {.kind = Kind::chunk, .number = chunks.size()};
  chunks.push_back({.offsets = values[0], .sizes = values[1]});
  return true;
}

bool QuickMachine::build_index(const Dict& dict, Lite& record) {
  constexpr std::array<Field, 3> kFields{{{Key::fqn, is_text, true},
                                          {Key::offset, may_be_size, false},
                                          {Key::index, may_be_integer, false}}};
  std::array<Lite, 3> values;
  if (!read_fields(dict, kFields, values)) return false;
  record = {.kind = Kind::index, .number = indices.size()};
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
  record = {.kind = Kind::info, .number = infos.size()};
  infos.push_back({.path = values[0],
                   .offset = values[1].number,
                   .length = values[2].number,
                   .transforms = values[3]});
  return true;
}

bool QuickMachine::all_are(std::size_t first, std::size_t step, Kind kind) const {
  for (std::size_t i = first; i < stack_.size(); i += step) {
    if (stack_[i].kind != kind) return false;
  }
  return true;
}

bool QuickMachine::append_chunks(List& list, std::size_t first) {
  if (!list.items.empty() || !all_are(first, 1, Kind::chunk)) return false;
  for (std::size_t i = first; i < stack_.size(); ++i) {
    const Chunk& chunk = chunks[stack_[i].number];
    list.chunks.push_back(numbers(chunk.offsets), numbers(chunk.sizes));
  }
  return true;
}

bool QuickMachine::hand_out(std::uint64_t dict, std::size_t first) {
  return dicts[dict].pairs.empty() && all_are(first, 2, Kind::index) &&
         all_are(first + 1, 2, Kind::info) && take_items(dict, std::span(stack_).subspan(first));
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

}  // namespace tessera::dcp
