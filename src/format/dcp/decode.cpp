// Reads `.metadata` (checkpoint-rows F-03): the pickle as values, then entries, then their items.
#include <algorithm>
#include <array>
#include <utility>

#include "base/text.h"
#include "format/dcp/assemble.h"
#include "format/dcp/dcp.h"
#include "format/dcp/quick_decode.h"
#include "format/pickle/names.h"
#include "format/pickle/pickle.h"
#include "tessera/error.h"
#include "value/equality.h"
#include "value/inner_tensors.h"
#include "value/render.h"

namespace tessera::dcp {
namespace {

using Kind = Value::Kind;

// The class of the memory formats in newer and in older torch, by module and name.
constexpr std::array<std::pair<std::string_view, std::string_view>, 2> kMemoryFormats = {{
    {kMetadataModule, "_MEM_FORMAT_ENCODING"},
    {kOldPropertiesModule, "MEM_FORMAT_ENCODING"},
}};

// `name` without what is in front of it in "OWNER.NAME".
std::string_view without_owner(std::string_view name, std::string_view owner) {
  const bool owned = name.starts_with(owner) && name.substr(owner.size()).starts_with('.');
  return owned ? name.substr(owner.size() + 1) : name;
}

// Whether `value` is an instance of a class, by one of its names. Other classes are not ours to
// guess at.
bool is_instance(const Value& value, const char* module, const char* name) {
  if (!value.is(Kind::object)) return false;
  const Value& callable = value.as_object().callable;
  return callable.is(Kind::global) && callable.global_name() == name &&
         newer_module(callable.global_module()) == module;
}

bool is_sequence(const Value& value) {
  return is_one_of(value.kind(), Kind::tuple, Kind::list);
}

// Whether `value` is an integer of at most 64 bits.
bool is_int64(const Value& value) {
  return value.is(Kind::integer) && value.as_integer().big.empty();
}

bool is_memory_format_class_of(const Value& value) {
  return value.is(Kind::global) &&
         is_memory_format_class(value.global_module(), value.global_name());
}

// The arguments of CLASS(value).
bool is_memory_format_number(const Value& arguments) {
  if (arguments.size() != 1 || !is_int64(arguments.items()[0])) return false;
  const std::int64_t number = arguments.items()[0].as_int();
  return number >= 0 && number <= kLastMemoryFormat;
}

// The arguments of getattr(CLASS, 'NAME').
bool is_memory_format_member(const Value& arguments) {
  if (arguments.size() != 2) return false;
  const Value& owner = arguments.items()[0];
  const Value& name = arguments.items()[1];
  return is_memory_format_class_of(owner) && name.is(Kind::string) &&
         pickle::is_known_member(owner.global_module(), owner.global_name(), name.as_string());
}

// Whether `value` is a member of MEM_FORMAT_ENCODING in one of the forms in which Python writes it:
// CLASS(value), getattr(CLASS, 'NAME'), or a global.
bool is_memory_format(const Value& value) {
  if (value.is(Kind::global))
    return is_memory_format_name(value.global_module(), value.global_name());
  if (!value.is(Kind::object)) return false;
  const Value& callable = value.as_object().callable;
  const Value& arguments = value.as_object().arguments;
  if (is_memory_format_class_of(callable)) return is_memory_format_number(arguments);
  return is_global(callable, "builtins", "getattr") && is_memory_format_member(arguments);
}

void require_instance(const Value& value, const char* module, const char* name) {
  if (is_instance(value, module, name)) return;
  if (value.is(Kind::object)) {
    throw Error(ErrorCode::unsupported, "found " + render(value.as_object().callable, 100) +
                                            ", expected " + module + "." + name);
  }
  corrupt("found " + std::string(describe(value.kind())) + ", expected " + module + "." + name);
}

// The attributes of an instance.
const Value& attributes(const Value& instance, const char* module, const char* name) {
  require_instance(instance, module, name);
  const auto& state = instance.as_object().state;
  if (!state || !state->is(Kind::dict)) corrupt(std::string(name) + " has no attributes");
  return *state;
}

const Value& attribute(const Value& attributes, const char* name, Kind kind) {
  const Value* value = attributes.find(name);
  if (value == nullptr) corrupt("attribute " + std::string(name) + " is missing");
  if (value->kind() != kind) {
    corrupt("attribute " + std::string(name) + " is " + std::string(describe(value->kind())) +
            ", expected " + std::string(describe(kind)));
  }
  return *value;
}

// An attribute that may be absent or None.
const Value* optional_attribute(const Value& attributes, const char* name) {
  const Value* value = attributes.find(name);
  return value == nullptr || value->is(Kind::none) ? nullptr : value;
}

Shape shape_of(const Value& attributes, const char* name) {
  const Value* value = attributes.find(name);
  auto shape = value == nullptr ? std::nullopt : size_from(*value);
  if (!shape) corrupt("attribute " + std::string(name) + " is not a torch.Size");
  require_dimensions(shape->size());
  return std::move(*shape);
}

std::uint64_t count_of(const Value& attributes, const char* name) {
  const Integer& number = attribute(attributes, name, Kind::integer).as_integer();
  if (!number.big.empty() || number.small < 0) {
    corrupt("attribute " + std::string(name) + " is " + render(Value::integer(number), 40));
  }
  return static_cast<std::uint64_t>(number.small);
}

// A string, or nothing to say.
std::string text_of(const Value* value) {
  return value != nullptr && value->is(Kind::string) ? value->as_string() : std::string();
}

// A string, or pathlib.PosixPath("/", "a", "b"); from Python 3.13 on PosixPath("/a/b").
std::string path_text(const Value& value) {
  if (!value.is(Kind::object) || !value.as_object().name().starts_with("pathlib."))
    return text_of(&value);
  std::string text;
  for (const Value& part : value.as_object().arguments.items()) {
    if (!part.is(Kind::string)) return {};
    append_path_part(text, part.as_string());
  }
  return text;
}

// One step of a path: a key or an index.
std::optional<PathPart> step_of(const Value& value) {
  if (value.is(Kind::string)) return value.as_string();
  if (is_int64(value)) return value.as_int();
  return std::nullopt;
}

std::optional<Path> path_of(const Value& value) {
  if (!is_sequence(value)) return std::nullopt;
  Path path;
  for (const Value& item : value.items()) {
    auto step = step_of(item);
    if (!step) return std::nullopt;
    path.push_back(std::move(*step));
  }
  return path;
}

// What TensorProperties are made of: (dtype, layout, requires_grad, memory format, pinned), or six
// with one more at the end.
const Value::List& properties_of(const Value& value) {
  const bool old = is_instance(value, kOldPropertiesModule, "TensorProperties");
  if (!old) require_instance(value, kMetadataModule, "TensorProperties");
  const auto& state = value.as_object().state;
  if (!state || !state->is(Kind::tuple) || !is_one_of(state->size(), 5U, 6U)) {
    corrupt("TensorProperties are not the five that are known");
  }
  return state->items();
}

DType dtype_of(const Value& value) {
  if (!value.is(Kind::global) || value.global_module() != "torch") {
    corrupt("the dtype is " + render(value, 60));
  }
  return dtype_from_torch(value.global_name());
}

std::vector<std::string> transforms_of(const Value& list) {
  if (!is_sequence(list)) corrupt("transform_descriptors are not a list");
  std::vector<std::string> transforms;
  for (const Value& transform : list.items()) {
    if (!transform.is(Kind::string)) corrupt("a transform descriptor is not a string");
    transforms.push_back(transform.as_string());
  }
  return transforms;
}

Value read_pickle(ByteView bytes, const pickle::ReadOptions& options) {
  pickle::Parsed parsed = pickle::read(bytes, options);
  if (parsed.consumed != bytes.size()) {
    throw Error(ErrorCode::corrupt, "bytes follow the end of the pickle")
        .at_offset(parsed.consumed);
  }
  return std::move(parsed.value);
}

class Decoder {
 public:
  Metadata run(ByteView bytes) && {
    const Value tree = read_pickle(bytes, options());
    const Value& root = attributes(tree, kMetadataModule, "Metadata");
    read_entries(attribute(root, "state_dict_metadata", Kind::dict));
    read_paths(optional_attribute(root, "planner_data"));
    read_items(attribute(root, "storage_data", Kind::dict));
    Metadata metadata = assembler_.finish();
    metadata.version = version_of(root);
    read_storage_meta(optional_attribute(root, "storage_meta"), metadata);
    return metadata;
  }

 private:
  static std::string version_of(const Value& root) {
    const Value* version = optional_attribute(root, "version");
    if (version != nullptr && !version->is(Kind::string))
      corrupt("attribute version is not a string");
    return text_of(version);
  }

  // A large file has several sizes for every chunk: they are read as the tuples that they hold.
  static pickle::ReadOptions options() {
    pickle::ReadOptions options;
    options.reduce = [](const Value& callable, const Value& arguments, Value& result) {
      const bool is_size = is_global(callable, "torch", "Size") && arguments.size() == 1 &&
                           arguments.items()[0].is(Kind::tuple);
      if (is_size) result = arguments.items()[0];
      return is_size;
    };
    return options;
  }

  void read_entries(const Value& dict) {
    assembler_.metadata.entries.reserve(dict.size());
    for (const auto& [key, value] : dict.pairs()) assembler_.add_entry(entry_of(key, value));
  }

  static Entry entry_of(const Value& key, const Value& value) {
    if (!key.is(Kind::string)) corrupt("a name is " + std::string(describe(key.kind())));
    Entry entry;
    entry.name = key.as_string();
    about_entry(entry.name, [&] {
      const bool is_object = is_instance(value, kMetadataModule, "BytesStorageMetadata");
      if (!is_object) read_tensor(value, entry);
    });
    return entry;
  }

  static void read_tensor(const Value& value, Entry& entry) {
    const Value& tensor = attributes(value, kMetadataModule, "TensorStorageMetadata");
    entry.is_tensor = true;
    entry.shape = shape_of(tensor, "size");
    read_properties(attribute(tensor, "properties", Kind::object), entry);
    const Value& chunks = attribute(tensor, "chunks", Kind::list);
    for (const Value& item : chunks.items()) {
      const Value& chunk = attributes(item, kMetadataModule, "ChunkStorageMetadata");
      const Box box{shape_of(chunk, "offsets"), shape_of(chunk, "sizes")};
      require_chunk_inside(entry, box.offsets, box.sizes);
      entry.chunks.push_back(box.offsets, box.sizes);
    }
  }

  static void read_properties(const Value& value, Entry& entry) {
    const auto& fields = properties_of(value);
    entry.dtype = dtype_of(fields[0]);
    if (!fields[2].is(Kind::boolean)) corrupt("requires_grad is " + render(fields[2], 60));
    entry.requires_grad = fields[2].as_bool();
    if (!is_memory_format(fields[3])) corrupt("the memory format is " + render(fields[3], 80));
  }

  void read_paths(const Value* planner_data) {
    const bool has_paths = planner_data != nullptr && planner_data->is(Kind::dict);
    assembler_.metadata.has_planner_data = has_paths;
    if (!has_paths) return;  // what other planners keep is theirs
    for (const auto& [key, value] : planner_data->pairs()) {
      if (!key.is(Kind::string)) continue;
      if (auto path = path_of(value)) assembler_.set_path(key.as_string(), std::move(*path));
    }
  }

  void read_items(const Value& dict) {
    for (const auto& [key, value] : dict.pairs()) read_item(key, value);
  }

  void read_item(const Value& key, const Value& value) {
    const Value& index = attributes(key, kMetadataModule, "MetadataIndex");
    const std::string& name = attribute(index, "fqn", Kind::string).as_string();
    about_entry(name, [&] {
      const Item item = item_of(value);
      std::optional<Shape> offset;
      if (optional_attribute(index, "offset") != nullptr) offset = shape_of(index, "offset");
      assembler_.add_item(name, {.offset = offset, .hint = hint_of(index)},
                          {item.path, item.offset, item.length, item.transforms});
    });
  }

  static std::optional<std::int64_t> hint_of(const Value& index) {
    const Value* hint = optional_attribute(index, "index");
    return hint != nullptr && is_int64(*hint) ? std::optional(hint->as_int()) : std::nullopt;
  }

  static Item item_of(const Value& value) {
    const bool olmo = is_instance(value, kOlmoFilesystemModule, "_StorageInfo");
    const Value& info =
        attributes(value, olmo ? kOlmoFilesystemModule : kFilesystemModule, "_StorageInfo");
    Item item;
    item.path = attribute(info, "relative_path", Kind::string).as_string();
    item.offset = count_of(info, "offset");
    item.length = count_of(info, "length");
    if (const Value* transforms = optional_attribute(info, "transform_descriptors"))
      item.transforms = transforms_of(*transforms);
    return item;
  }

  static void read_storage_meta(const Value* value, Metadata& metadata) {
    if (value == nullptr) return;
    const Value& meta = attributes(*value, kMetadataModule, "StorageMeta");
    if (const Value* id = optional_attribute(meta, "checkpoint_id")) {
      metadata.checkpoint_id = path_text(*id);
    }
    metadata.save_id = text_of(optional_attribute(meta, "save_id"));
  }

  Assembler assembler_;
};

}  // namespace

std::string_view newer_module(std::string_view module) {
  if (module == "torch.distributed._shard.checkpoint.metadata") return kMetadataModule;
  if (module == "torch.distributed._shard.checkpoint.filesystem") return kFilesystemModule;
  return module;
}

bool is_memory_format_class(std::string_view module, std::string_view name) {
  return std::ranges::count(kMemoryFormats, std::pair(module, name)) != 0;
}

bool is_memory_format_name(std::string_view module, std::string_view name) {
  return std::ranges::any_of(kMemoryFormats, [&](const auto& known) {
    const auto& [home, owner] = known;
    return home == module && pickle::is_known_member(home, owner, without_owner(name, owner));
  });
}

Metadata decode(ByteView bytes) {
  if (auto metadata = quick_decode(bytes)) return std::move(*metadata);
  return decode_values(bytes);
}

Metadata decode_values(ByteView bytes) {
  return Decoder().run(bytes);
}

}  // namespace tessera::dcp
