#include "format/dcp/quick_decode.h"

#include <unordered_set>
#include <utility>

#include "format/dcp/assemble.h"
#include "format/dcp/names.h"
#include "format/dcp/quick_machine.h"
#include "tessera/error.h"

namespace tessera::dcp {
namespace {

using Kind = Lite::Kind;

// Every function answers false for what is not laid out as expected.
class QuickDecoder {
 public:
  explicit QuickDecoder(ByteView bytes) : machine_(bytes) {}

  std::optional<Metadata> run() {
    const std::optional<Lite> root = machine_.run();
    Lite state;
    if (!root || !state_of(*root, Name::metadata, state)) return std::nullopt;
    const Lite* entries = find(state, "state_dict_metadata");
    const Lite* storage = find(state, "storage_data");
    if (entries == nullptr || storage == nullptr || !read_entries(*entries)) return std::nullopt;
    if (!read_paths(find(state, "planner_data")) || !read_items(*storage)) return std::nullopt;
    Metadata metadata = assembler_.finish();
    const Lite* version = find(state, "version");
    if (!text_or_none(version, metadata.version)) return std::nullopt;
    if (!read_storage_meta(find(state, "storage_meta"), metadata) || !known_) return std::nullopt;
    return metadata;
  }

 private:
  const Lite* find(const Lite& dict, std::string_view key) {
    return machine_.find(dict, key, known_);
  }

  bool is_object(const Lite& value, Name name) const {
    return value.kind == Kind::object && machine_.objects[value.number].name == name;
  }

  static bool is_name(const Lite& value, Name name) {
    return value.kind == Kind::name && Name{static_cast<std::uint8_t>(value.count)} == name;
  }

  // The dict of an instance's attributes.
  bool state_of(const Lite& value, Name name, Lite& state) const {
    if (!is_object(value, name)) return false;
    const auto& object = machine_.objects[value.number];
    state = object.state;
    return object.has_state && state.kind == Kind::dict;
  }

  [[nodiscard]] std::string text(const Lite& value) const {
    return std::string(machine_.text(value));
  }

  bool text_or_none(const Lite* value, std::string& out) const {
    if (value == nullptr || value->kind == Kind::none) return true;
    if (value->kind != Kind::text) return false;
    out = text(*value);
    return true;
  }

  [[nodiscard]] Shape shape(const Lite& size) const {
    const auto first = machine_.dims.begin() + static_cast<std::ptrdiff_t>(size.number);
    return {first, first + static_cast<std::ptrdiff_t>(size.count)};
  }

  bool read_entries(const Lite& dict) {
    if (dict.kind != Kind::dict) return false;
    const auto& pairs = machine_.dicts[dict.number].pairs;
    assembler_.metadata.entries.reserve(pairs.size() / 2);
    std::unordered_set<std::string_view> names;
    for (std::size_t i = 0; i + 1 < pairs.size(); i += 2) {
      if (pairs[i].kind != Kind::text || !names.insert(machine_.text(pairs[i])).second)
        return false;
      Entry entry;
      entry.name = text(pairs[i]);
      if (!is_object(pairs[i + 1], Name::bytes) && !read_tensor(pairs[i + 1], entry)) return false;
      assembler_.add_entry(std::move(entry));
    }
    return true;
  }

  bool read_tensor(const Lite& value, Entry& entry) {
    Lite state;
    if (!state_of(value, Name::tensor, state)) return false;
    const Lite* size = find(state, "size");
    const Lite* properties = find(state, "properties");
    const Lite* chunks = find(state, "chunks");
    if (size == nullptr || size->kind != Kind::size || chunks == nullptr ||
        chunks->kind != Kind::list || properties == nullptr ||
        !read_properties(*properties, entry)) {
      return false;
    }
    entry.is_tensor = true;
    entry.shape = shape(*size);
    const auto& list = machine_.lists[chunks->number];
    entry.chunks.reserve(list.size());
    for (const Lite& item : list) {
      if (item.kind != Kind::chunk) return false;
      const QuickMachine::Chunk& chunk = machine_.chunks[item.number];
      entry.chunks.push_back({Box{shape(chunk.offsets), shape(chunk.sizes)}, {}});
    }
    return true;
  }

  bool read_properties(const Lite& value, Entry& entry) const {
    if (!is_object(value, Name::properties)) return false;
    const auto& object = machine_.objects[value.number];
    if (!object.has_state || object.state.kind != Kind::tuple) return false;
    const std::vector<Lite> fields = machine_.items_of(object.state);
    if (fields.size() != 5 && fields.size() != 6) return false;
    if (!is_name(fields[0], Name::torch_name) || fields[2].kind != Kind::boolean) return false;
    entry.dtype = dtype_from_torch(std::string(machine_.torch_names[fields[0].number]));
    entry.requires_grad = fields[2].number != 0;
    return is_memory_format(fields[3]);
  }

  bool is_memory_format(const Lite& value) const {
    if (is_name(value, Name::memory_member) || is_object(value, Name::getattr)) return true;
    if (!is_object(value, Name::memory_format)) return false;
    const std::vector<Lite> format = machine_.items_of(machine_.objects[value.number].arguments);
    return format.size() == 1 && format[0].kind == Kind::integer &&
           format[0].number <= static_cast<std::uint64_t>(kLastMemoryFormat);
  }

  bool read_paths(const Lite* planner_data) {
    const bool has_paths = planner_data != nullptr && planner_data->kind == Kind::dict;
    assembler_.metadata.has_planner_data = has_paths;
    if (!has_paths) return planner_data == nullptr || planner_data->kind == Kind::none;
    const auto& pairs = machine_.dicts[planner_data->number].pairs;
    std::unordered_set<std::string_view> names;
    for (std::size_t i = 0; i + 1 < pairs.size(); i += 2) {
      const Lite& value = pairs[i + 1];
      if (pairs[i].kind != Kind::text || !names.insert(machine_.text(pairs[i])).second ||
          (value.kind != Kind::tuple && value.kind != Kind::list)) {
        return false;
      }
      Path path;
      if (!read_path(value, path)) return false;
      assembler_.set_path(text(pairs[i]), std::move(path));
    }
    return true;
  }

  bool read_path(const Lite& parts, Path& path) const {
    for (const Lite& part : machine_.items_of(parts)) {
      if (part.kind == Kind::text) {
        path.emplace_back(text(part));
      } else if (part.kind == Kind::integer) {
        path.emplace_back(static_cast<std::int64_t>(part.number));
      } else {
        return false;
      }
    }
    return true;
  }

  bool read_items(const Lite& dict) {
    if (dict.kind != Kind::dict) return false;
    const auto& pairs = machine_.dicts[dict.number].pairs;
    std::string name;
    for (std::size_t i = 0; i + 1 < pairs.size(); i += 2) {
      if (pairs[i].kind != Kind::index || pairs[i + 1].kind != Kind::info) return false;
      const QuickMachine::Index& index = machine_.indices[pairs[i].number];
      const QuickMachine::Info& info = machine_.infos[pairs[i + 1].number];
      Item item{text(info.path), info.offset, info.length, {}};
      if (info.transforms.kind != Kind::none) {
        for (const Lite& transform : machine_.items_of(info.transforms)) {
          if (transform.kind != Kind::text) return false;
          item.transforms.push_back(text(transform));
        }
      }
      Assembler::Index place;
      if (index.offset.kind == Kind::size) place.offset = shape(index.offset);
      if (index.hint.kind == Kind::integer)
        place.hint = static_cast<std::int64_t>(index.hint.number);
      name = machine_.text(index.name);
      assembler_.add_item(name, place, std::move(item));
    }
    return true;
  }

  bool read_storage_meta(const Lite* value, Metadata& metadata) {
    if (value == nullptr || value->kind == Kind::none) return true;
    Lite state;
    if (!state_of(*value, Name::storage_meta, state)) return false;
    const Lite* id = find(state, "checkpoint_id");
    if (id != nullptr && id->kind == Kind::object) {
      if (!path_text(*id, metadata.checkpoint_id)) return false;
    } else if (!text_or_none(id, metadata.checkpoint_id)) {
      return false;
    }
    return text_or_none(find(state, "save_id"), metadata.save_id);
  }

  // pathlib.PosixPath("/", "a", "b").
  bool path_text(const Lite& value, std::string& out) const {
    if (!is_object(value, Name::path)) return false;
    for (const Lite& part : machine_.items_of(machine_.objects[value.number].arguments)) {
      if (part.kind != Kind::text) return false;
      if (!out.empty() && !out.ends_with('/')) out += '/';
      out += machine_.text(part);
    }
    return true;
  }

  QuickMachine machine_;
  Assembler assembler_;
  bool known_ = true;  // no attribute was there twice
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
