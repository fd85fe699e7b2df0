// Reads `.metadata` (spec F-03): the pickle as values, then entries, then their items.
#include "format/dcp/assemble.h"
#include "format/dcp/dcp.h"
#include "format/dcp/names.h"
#include "format/dcp/quick_decode.h"
#include "format/pickle/names.h"
#include "format/pickle/pickle.h"
#include "tessera/error.h"
#include "value/render.h"
#include "value/size.h"

namespace tessera::dcp {
namespace {

using Kind = Value::Kind;

[[noreturn]] void corrupt(std::string what) {
  throw Error(ErrorCode::corrupt, std::move(what));
}

// `value` as an instance of a class by one of its names. Other classes are not ours to guess at.
bool is_instance(const Value& value, const char* module, const char* name) {
  if (!value.is(Kind::object)) return false;
  const Value& callable = value.as_object().callable;
  return callable.is(Kind::global) && callable.global_name() == name &&
         callable.global_module() == module;
}

bool is_memory_format_class_of(const Value& value) {
  return value.is(Kind::global) &&
         is_memory_format_class(value.global_module(), value.global_name());
}

// The arguments of CLASS(value).
bool is_memory_format_number(const Value& arguments) {
  if (arguments.size() != 1 || !arguments.items()[0].is(Kind::integer)) return false;
  const Integer& number = arguments.items()[0].as_integer();
  return number.big.empty() && number.small >= 0 && number.small <= kLastMemoryFormat;
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
  if (!value.is(Kind::object) || !value.as_object().callable.is(Kind::global)) return false;
  const Value& callable = value.as_object().callable;
  const Value& arguments = value.as_object().arguments;
  if (is_memory_format_class_of(callable)) return is_memory_format_number(arguments);
  return callable.global_module() == "builtins" && callable.global_name() == "getattr" &&
         is_memory_format_member(arguments);
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

class Decoder {
 public:
  Metadata run(ByteView bytes) && {
    const pickle::Parsed parsed = pickle::read(bytes, options());
    if (parsed.consumed != bytes.size()) {
      throw Error(ErrorCode::corrupt, "bytes follow the end of the pickle")
          .at_offset(parsed.consumed);
    }
    const Value& root = attributes(parsed.value, kMetadataModule, "Metadata");
    read_entries(attribute(root, "state_dict_metadata", Kind::dict));
    read_paths(optional_attribute(root, "planner_data"));
    read_items(attribute(root, "storage_data", Kind::dict));
    Metadata metadata = assembler_.finish();
    if (const Value* version = optional_attribute(root, "version")) {
      if (!version->is(Kind::string)) corrupt("attribute version is not a string");
      metadata.version = version->as_string();
    }
    read_storage_meta(optional_attribute(root, "storage_meta"), metadata);
    return metadata;
  }

 private:
  // A large file has several sizes for every chunk: they are read as the tuples that they hold.
  static pickle::ReadOptions options() {
    pickle::ReadOptions options;
    options.reduce = [](const Value& callable, const Value& arguments, Value& result) {
      if (!callable.is(Kind::global) || callable.global_name() != "Size" ||
          callable.global_module() != "torch" || arguments.size() != 1 ||
          !arguments.items()[0].is(Kind::tuple)) {
        return false;
      }
      result = arguments.items()[0];
      return true;
    };
    return options;
  }

  void read_entries(const Value& dict) {
    assembler_.metadata.entries.reserve(dict.size());
    for (const auto& [key, value] : dict.pairs()) {
      if (!key.is(Kind::string)) corrupt("a name is " + std::string(describe(key.kind())));
      Entry entry;
      entry.name = key.as_string();
      try {
        if (is_instance(value, kMetadataModule, "BytesStorageMetadata")) {
          entry.is_tensor = false;
        } else {
          read_tensor(value, entry);
        }
      } catch (Error& error) {
        error.at_key(printable(entry.name));
        throw;
      }
      assembler_.add_entry(std::move(entry));
    }
  }

  static void read_tensor(const Value& value, Entry& entry) {
    const Value& tensor = attributes(value, kMetadataModule, "TensorStorageMetadata");
    entry.is_tensor = true;
    entry.shape = shape_of(tensor, "size");
    read_properties(attribute(tensor, "properties", Kind::object), entry);
    const Value& chunks = attribute(tensor, "chunks", Kind::list);
    entry.chunks.reserve(chunks.size());
    for (const Value& item : chunks.items()) {
      const Value& chunk = attributes(item, kMetadataModule, "ChunkStorageMetadata");
      entry.chunks.push_back({Box{shape_of(chunk, "offsets"), shape_of(chunk, "sizes")}, {}});
    }
  }

  // (dtype, layout, requires_grad, memory format, pinned), or six with one more at the end.
  static void read_properties(const Value& value, Entry& entry) {
    const bool old = is_instance(value, kOldPropertiesModule, "TensorProperties");
    if (!old) require_instance(value, kMetadataModule, "TensorProperties");
    const auto& state = value.as_object().state;
    if (!state || !state->is(Kind::tuple) || (state->size() != 5 && state->size() != 6)) {
      corrupt("TensorProperties are not the five that are known");
    }
    const auto& fields = state->items();
    if (!fields[0].is(Kind::global) || fields[0].global_module() != "torch") {
      corrupt("the dtype is " + render(fields[0], 60));
    }
    entry.dtype = dtype_from_torch(fields[0].global_name());
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

  static std::optional<Path> path_of(const Value& value) {
    if (!value.is(Kind::tuple) && !value.is(Kind::list)) return std::nullopt;
    Path path;
    for (const Value& part : value.items()) {
      if (part.is(Kind::string)) {
        path.emplace_back(part.as_string());
      } else if (part.is(Kind::integer) && part.as_integer().big.empty()) {
        path.emplace_back(part.as_integer().small);
      } else {
        return std::nullopt;
      }
    }
    return path;
  }

  void read_items(const Value& dict) {
    for (const auto& [key, value] : dict.pairs()) {
      const Value& index = attributes(key, kMetadataModule, "MetadataIndex");
      const std::string& name = attribute(index, "fqn", Kind::string).as_string();
      Item item;
      Assembler::Index place;
      try {
        item = item_of(value);
        if (optional_attribute(index, "offset") != nullptr)
          place.offset = shape_of(index, "offset");
        const Value* hint = optional_attribute(index, "index");
        if (hint != nullptr && hint->is(Kind::integer) && hint->as_integer().big.empty())
          place.hint = hint->as_integer().small;
      } catch (Error& error) {
        error.at_key(printable(name));
        throw;
      }
      assembler_.add_item(name, place, std::move(item));
    }
  }

  static Item item_of(const Value& value) {
    const bool olmo = is_instance(value, kOlmoFilesystemModule, "_StorageInfo");
    const Value& info =
        attributes(value, olmo ? kOlmoFilesystemModule : kFilesystemModule, "_StorageInfo");
    Item item;
    item.path = attribute(info, "relative_path", Kind::string).as_string();
    item.offset = count_of(info, "offset");
    item.length = count_of(info, "length");
    if (const Value* transforms = optional_attribute(info, "transform_descriptors")) {
      if (!transforms->is(Kind::list) && !transforms->is(Kind::tuple)) {
        corrupt("transform_descriptors are not a list");
      }
      for (const Value& transform : transforms->items()) {
        if (!transform.is(Kind::string)) corrupt("a transform descriptor is not a string");
        item.transforms.push_back(transform.as_string());
      }
    }
    return item;
  }

  static void read_storage_meta(const Value* value, Metadata& metadata) {
    if (value == nullptr) return;
    const Value& meta = attributes(*value, kMetadataModule, "StorageMeta");
    if (const Value* id = optional_attribute(meta, "checkpoint_id")) {
      metadata.checkpoint_id = path_text(*id);
    }
    const Value* save_id = optional_attribute(meta, "save_id");
    if (save_id != nullptr && save_id->is(Kind::string)) metadata.save_id = save_id->as_string();
  }

  // A string, or pathlib.PosixPath("/", "a", "b"); from Python 3.13 on PosixPath("/a/b").
  static std::string path_text(const Value& value) {
    if (value.is(Kind::string)) return value.as_string();
    if (!value.is(Kind::object) || !value.as_object().name().starts_with("pathlib.")) return {};
    std::string text;
    for (const Value& part : value.as_object().arguments.items()) {
      if (!part.is(Kind::string)) return {};
      if (!text.empty() && !text.ends_with('/')) text += '/';
      text += part.as_string();
    }
    return text;
  }

  Assembler assembler_;
};

}  // namespace

bool is_memory_format_name(std::string_view module, std::string_view name) {
  const bool old = module == kOldPropertiesModule;
  if (!old && module != kMetadataModule) return false;
  const std::string_view owner = old ? "MEM_FORMAT_ENCODING" : "_MEM_FORMAT_ENCODING";
  if (name.size() > owner.size() && name.starts_with(owner) && name[owner.size()] == '.')
    name.remove_prefix(owner.size() + 1);
  return pickle::is_known_member(module, owner, name);
}

Metadata decode(ByteView bytes) {
  if (auto metadata = quick_decode(bytes)) return std::move(*metadata);
  return decode_values(bytes);
}

Metadata decode_values(ByteView bytes) {
  return Decoder().run(bytes);
}

}  // namespace tessera::dcp
