#include "format/dcp/quick_decode.h"

#include <algorithm>
#include <array>
#include <utility>

#include "base/text.h"
#include "format/dcp/assemble.h"
#include "format/pickle/names.h"
#include "format/pickle/text.h"

namespace tessera::dcp {
namespace {

struct Known {
  std::string_view module;
  std::string_view name;
  Name is;
};

constexpr std::array<Known, 17> kKnown{{
    {kMetadataModule, "Metadata", Name::metadata},
    {kMetadataModule, "TensorStorageMetadata", Name::tensor},
    {kMetadataModule, "BytesStorageMetadata", Name::bytes},
    {kMetadataModule, "ChunkStorageMetadata", Name::chunk},
    {kMetadataModule, "TensorProperties", Name::properties},
    {kOldPropertiesModule, "TensorProperties", Name::properties},
    {kMetadataModule, "MetadataIndex", Name::index},
    {kMetadataModule, "StorageMeta", Name::storage_meta},
    {kFilesystemModule, "_StorageInfo", Name::storage_info},
    {kOlmoFilesystemModule, "_StorageInfo", Name::storage_info},
    {kMetadataModule, "_MEM_FORMAT_ENCODING", Name::memory_format},
    {kOldPropertiesModule, "MEM_FORMAT_ENCODING", Name::memory_format},
    {"torch", "Size", Name::size},
    {"torch.serialization", "_get_layout", Name::layout},
    {"pathlib", "PosixPath", Name::path},
    {"pathlib._local", "PosixPath", Name::path},
    {"builtins", "getattr", Name::getattr},
}};

constexpr std::array<std::pair<std::string_view, Key>, 8> kLiteKeys{{
    {"offsets", Key::offsets},
    {"sizes", Key::sizes},
    {"fqn", Key::fqn},
    {"offset", Key::offset},
    {"index", Key::index},
    {"relative_path", Key::relative_path},
    {"length", Key::length},
    {"transform_descriptors", Key::transforms},
}};

Key key_of(std::string_view text) {
  const auto* known = std::ranges::find(kLiteKeys, text, &std::pair<std::string_view, Key>::first);
  return known == kLiteKeys.end() ? Key::other : known->second;
}

// `count` of a list, dict or object that the memo gave out: it may not be changed any more.
constexpr std::uint32_t kComplete = 1;

bool is_container(const Lite& value) {
  return is_one_of(value.kind, LiteKind::list, LiteKind::dict, LiteKind::object);
}

// How a pickle makes something of a name.
enum class Made : std::uint8_t { by_new, by_call, never };

constexpr Made made_of(Name name) {
  if (is_one_of(name, Name::memory_member, Name::torch_name)) return Made::never;
  const bool called =
      is_one_of(name, Name::size, Name::layout, Name::memory_format, Name::getattr, Name::path);
  return called ? Made::by_call : Made::by_new;
}

// A container of this kind that may still be changed.
bool is_open(const Lite& value, LiteKind kind) {
  return value.kind == kind && value.count != kComplete;
}

Name name_of(const Lite& value) {
  return Name{static_cast<std::uint8_t>(value.count)};
}

// The class or function of this name, but for dtypes.
std::optional<Name> find_known(std::string_view module, std::string_view name) {
  const std::string_view home = newer_module(module);
  const auto* known = std::ranges::find_if(
      kKnown, [&](const Known& each) { return each.name == name && each.module == home; });
  if (known != kKnown.end()) return known->is;
  if (is_memory_format_name(module, name)) return Name::memory_member;
  return std::nullopt;
}

}  // namespace

constinit const std::array<QuickMachine::QuickSteps::Step, 256> QuickMachine::kSteps =
    QuickSteps::with({}, [](QuickMachine&, const pickle::Opcode&) { return false; });

std::optional<Lite> QuickMachine::run() {
  if (survey_.end() != bytes_.size()) return std::nullopt;
  for (Op op{cursor_.opcode()}; op != Op::stop; op = Op{cursor_.opcode()}) {
    if (!kSteps[static_cast<std::uint8_t>(op)](*this, pickle::opcode_of(op))) return std::nullopt;
  }
  if (stack_.size() != 1 || !marks_.empty()) return std::nullopt;
  return stack_.front();
}

// The first opcode, or none.
bool QuickMachine::read_protocol() {
  if (cursor_.at() != 1) return false;
  protocol_ = cursor_.number<std::uint8_t>();
  return protocol_ <= 5;
}

bool QuickMachine::enter_frame(std::uint64_t size) {
  cursor_.enter_frame(size);
  return true;
}

bool QuickMachine::push(Lite value) {
  ++pushed_;
  stack_.push_back(value);
  return true;
}

bool QuickMachine::push_integer(std::int64_t value) {
  return push({.kind = LiteKind::integer, .number = static_cast<std::uint64_t>(value)});
}

bool QuickMachine::push_long(ByteView bytes) {
  if (bytes.empty() || bytes.size() > sizeof(std::int64_t)) return false;
  // Two's complement, little end first.
  std::uint64_t value = std::to_integer<unsigned>(bytes.back()) >= 0x80 ? ~std::uint64_t{0} : 0;
  for (std::size_t i = bytes.size(); i-- > 0;)
    value = value << 8U | std::to_integer<std::uint64_t>(bytes[i]);
  return push_integer(static_cast<std::int64_t>(value));
}

bool QuickMachine::push_text(std::string_view text) {
  pickle::require_utf8(text);
  const auto begin = text.data() - reinterpret_cast<const char*>(bytes_.data());
  return push({LiteKind::text, key_of(text), static_cast<std::uint32_t>(text.size()),
               static_cast<std::uint64_t>(begin)});
}

bool QuickMachine::push_empty_list() {
  lists.emplace_back();
  return push({.kind = LiteKind::list, .number = lists.size() - 1});
}

bool QuickMachine::push_empty_dict() {
  if (open_dicts_ == dicts.size()) dicts.emplace_back();
  return push({.kind = LiteKind::dict, .number = open_dicts_++});
}

bool QuickMachine::open_mark() {
  marks_.push_back({stack_.size(), dims.size(), lists.size(), chunks.size(), indices.size(),
                    infos.size(), kept_containers_});
  return true;
}

bool QuickMachine::first_of(const pickle::Opcode& opcode, std::size_t& first) {
  const std::size_t under = opcode.target ? 1 : 0;
  if (opcode.pops != pickle::kToMark) {
    first = stack_.size() - opcode.pops;
    return above_mark() >= opcode.pops + under;
  }
  if (marks_.empty()) return false;
  since_ = marks_.back();
  first = since_.stack;
  marks_.pop_back();
  return above_mark() >= stack_.size() - first + under;
}

bool QuickMachine::push_tuple(const pickle::Opcode& opcode) {
  std::size_t first = 0;
  if (!first_of(opcode, first)) return false;
  const std::size_t count = stack_.size() - first;
  const Lite tuple{
      .kind = LiteKind::tuple, .count = static_cast<std::uint32_t>(count), .number = items.size()};
  items.insert(items.end(), stack_.begin() + static_cast<std::ptrdiff_t>(first), stack_.end());
  stack_.resize(first);
  return push(tuple);
}

bool QuickMachine::append(const pickle::Opcode& opcode) {
  std::size_t first = 0;
  if (!first_of(opcode, first)) return false;
  const Lite target = stack_[first - 1];
  if (!is_open(target, LiteKind::list)) return false;
  List& list = lists[target.number];
  if (first < stack_.size() && stack_[first].kind == LiteKind::chunk) {
    if (!append_chunks(list, first)) return false;
    stack_.resize(first);
    forget_batch(opcode);
    return true;
  }
  if (!list.chunks.empty()) return false;
  list.items.insert(list.items.end(), stack_.begin() + static_cast<std::ptrdiff_t>(first),
                    stack_.end());
  stack_.resize(first);
  return true;
}

bool QuickMachine::set_items(const pickle::Opcode& opcode) {
  std::size_t first = 0;
  if (!first_of(opcode, first)) return false;
  const Lite target = stack_[first - 1];
  if (!is_open(target, LiteKind::dict) || (stack_.size() - first) % 2 != 0) return false;
  if (first < stack_.size() && stack_[first].kind == LiteKind::index) {
    if (!hand_out(target.number, first)) return false;
    stack_.resize(first);
    forget_batch(opcode);
    return true;
  }
  // Keys of other kinds are for the machine of values, which knows which have a hash.
  if (!all_are(first, 2, LiteKind::text)) return false;
  auto& pairs = dicts[target.number].pairs;
  pairs.insert(pairs.end(), stack_.begin() + static_cast<std::ptrdiff_t>(first), stack_.end());
  stack_.resize(first);
  return true;
}

bool QuickMachine::memoize_next() {
  const std::uint64_t index = memo_size_++;
  // As the machine of values: a pickler numbers a value once.
  if (above_mark() == 0 || memo_size_ > pushed_) return false;
  if (survey_.is_recalled(index)) {
    memo_.push_back(stack_.back());
    keep(stack_.back());
  }
  return true;
}

// What is given out again must stay where it is.
void QuickMachine::keep(const Lite& value) {
  if (value.kind == LiteKind::tuple) kept_items_ = items.size();
  if (value.kind == LiteKind::size) kept_dims_ = dims.size();
  if (is_container(value) || value.kind == LiteKind::tuple) ++kept_containers_;
  if (value.kind == LiteKind::dict) dicts[value.number].wanted = true;
  if (value.kind == LiteKind::object) objects[value.number].wanted = true;
}

bool QuickMachine::recall(std::uint64_t index) {
  if (index >= memo_size_) return false;
  Lite value = memo_[survey_.recalled_before(index)];
  if (is_container(value)) {
    // A container on the stack is not complete: in another one the two could form a cycle.
    if (is_on_stack(value)) return false;
    value.count = kComplete;
  }
  return push(value);
}

bool QuickMachine::is_on_stack(const Lite& value) const {
  return std::ranges::any_of(stack_, [&value](const Lite& slot) {
    return slot.kind == value.kind && slot.number == value.number;
  });
}

// Takes off a value; POP of a mark is for others.
bool QuickMachine::drop() {
  if (above_mark() == 0) return false;
  stack_.pop_back();
  return true;
}

bool QuickMachine::push_global() {
  const std::string_view module = cursor_.line();
  return push_name(module, cursor_.line());
}

bool QuickMachine::push_stack_global() {
  if (above_mark() < 2) return false;
  const Lite name = stack_.back();
  const Lite module = stack_[stack_.size() - 2];
  if (name.kind != LiteKind::text || module.kind != LiteKind::text) return false;
  stack_.resize(stack_.size() - 2);
  return push_name(text(module), text(name));
}

bool QuickMachine::push_name(std::string_view module, std::string_view name) {
  if (protocol_ < 3 && module == "__builtin__") module = "builtins";
  if (const auto known = find_known(module, name))
    return push({.kind = LiteKind::name, .count = static_cast<std::uint32_t>(*known)});
  if (module != "torch") return false;
  torch_names.push_back(name);
  return push({.kind = LiteKind::name,
               .count = static_cast<std::uint32_t>(Name::torch_name),
               .number = torch_names.size() - 1});
}

bool QuickMachine::make(bool by_new) {
  if (above_mark() < 2) return false;
  const Lite arguments = stack_.back();
  const Lite callable = stack_[stack_.size() - 2];
  if (callable.kind != LiteKind::name || arguments.kind != LiteKind::tuple) return false;
  if (made_of(name_of(callable)) != (by_new ? Made::by_new : Made::by_call)) return false;
  stack_.resize(stack_.size() - 2);
  return make_object(name_of(callable), arguments);
}

bool QuickMachine::make_object(Name name, const Lite& arguments) {
  if (name == Name::size) return make_size(arguments);
  if (name == Name::getattr && !is_member(arguments)) return false;
  objects.push_back({name, arguments, {}});
  return push({.kind = LiteKind::object, .number = objects.size() - 1});
}

// Whether the arguments of getattr are a class of memory formats, and the name of one.
bool QuickMachine::is_member(const Lite& arguments) const {
  if (arguments.count != 2) return false;
  const Lite& owner = items[arguments.number];
  const Lite& name = items[arguments.number + 1];
  return owner.kind == LiteKind::name && name_of(owner) == Name::memory_format &&
         name.kind == LiteKind::text &&
         pickle::is_known_member(kMetadataModule, "_MEM_FORMAT_ENCODING", text(name));
}

// torch.Size((...)): its numbers move to `dims`.
bool QuickMachine::make_size(const Lite& arguments) {
  if (arguments.count != 1) return false;
  const Lite numbers = items[arguments.number];
  if (numbers.kind != LiteKind::tuple) return false;
  const Lite size{.kind = LiteKind::size, .count = numbers.count, .number = dims.size()};
  for (std::size_t i = 0; i < numbers.count; ++i) {
    const Lite& number = items[numbers.number + i];
    if (number.kind != LiteKind::integer) return false;
    dims.push_back(static_cast<std::int64_t>(number.number));
  }
  forget_size(arguments, numbers);
  return push(size);
}

// Gives back the places of a size's tuples, when they are the last ones.
void QuickMachine::forget_size(const Lite& arguments, const Lite& numbers) {
  const bool on_top =
      arguments.number + 1 == items.size() && numbers.number + numbers.count == arguments.number;
  if (on_top && numbers.number >= kept_items_) items.resize(numbers.number);
}

bool QuickMachine::build() {
  if (above_mark() < 2) return false;
  const Lite state = stack_.back();
  const Lite target = stack_[stack_.size() - 2];
  if (!is_open(target, LiteKind::object) || objects[target.number].has_state) return false;
  Object& object = objects[target.number];
  stack_.pop_back();
  object.state = state;
  object.has_state = true;
  const bool has_record = is_one_of(object.name, Name::chunk, Name::index, Name::storage_info);
  return !has_record || replace_by_record(target, state);
}

const Lite* QuickMachine::find_on_stack(std::string_view key) const {
  for (std::size_t i = 0; i + 1 < stack_.size(); ++i) {
    if (stack_[i].kind == LiteKind::text && text(stack_[i]) == key) return &stack_[i + 1];
  }
  return nullptr;
}

std::vector<Lite> QuickMachine::items_of(const Lite& lite) const {
  if (lite.kind == LiteKind::list) return lists[lite.number].items;
  const auto first = items.begin() + static_cast<std::ptrdiff_t>(lite.number);
  return {first, first + static_cast<std::ptrdiff_t>(lite.count)};
}

const Lite* QuickMachine::find(const Lite& dict, std::string_view key) const {
  const auto& pairs = dicts[dict.number].pairs;
  for (std::size_t i = 0; i + 1 < pairs.size(); i += 2) {
    if (text(pairs[i]) == key) return &pairs[i + 1];
  }
  return nullptr;
}

bool QuickMachine::has_each_key_once() const {
  std::vector<std::string_view> keys;
  for (const Dict& dict : std::span(dicts).first(open_dicts_)) {
    keys.clear();
    for (std::size_t i = 0; i < dict.pairs.size(); i += 2) keys.push_back(text(dict.pairs[i]));
    std::ranges::sort(keys);
    if (std::ranges::adjacent_find(keys) != keys.end()) return false;
  }
  return true;
}

}  // namespace tessera::dcp
