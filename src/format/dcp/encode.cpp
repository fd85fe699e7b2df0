// Writes `.metadata` (checkpoint-rows F-03) as PyTorch does: the same classes and sharing of
// strings.
#include <algorithm>
#include <iterator>

#include "base/checked.h"
#include "format/dcp/dcp.h"
#include "format/dcp/names.h"
#include "format/pickle/pickle.h"
#include "tessera/error.h"
#include "value/render.h"

namespace tessera::dcp {
namespace {

class Encoder {
 public:
  std::vector<std::byte> run(const Metadata& metadata) {
    Value entries = Value::dict();
    Value paths = Value::dict();
    Value items = Value::dict();
    for (const Entry& entry : metadata.entries) {
      const Value name(entry.name);
      require_new(entry.name, entries);
      entries.set_item(name, entry.is_tensor ? tensor_of(entry) : instance(bytes_class_, {}));
      if (metadata.has_planner_data) paths.set_item(name, path_of(entry, name));
      add_items(entry, name, items);
    }
    const Value root =
        instance(known(metadata_module_, "Metadata"),
                 {{"state_dict_metadata", std::move(entries)},
                  {"planner_data", metadata.has_planner_data ? std::move(paths) : Value()},
                  {"storage_data", std::move(items)},
                  {"storage_meta", storage_meta_of(metadata)},
                  {"version", text_or_none(metadata.version)}});
    return pickle::write(root, {.protocol = 4, .persistent_id = {}, .reduce = {}});
  }

 private:
  static void require_new(const std::string& name, const Value& entries) {
    if (entries.find(name) == nullptr) return;
    throw Error(ErrorCode::conflict, "two entries have this name").at_key(printable(name));
  }

  static Value text_or_none(const std::string& text) {
    return text.empty() ? Value() : Value(text);
  }

  void add_items(const Entry& entry, const Value& name, Value& items) {
    if (!entry.is_tensor) {
      items.set_item(index_of(name, nullptr, {}), info_of(entry.item));
      return;
    }
    std::int64_t number = 0;
    for (const Chunk& chunk : entry.chunks) {
      items.set_item(index_of(name, &chunk.box.offsets, Value(number++)), info_of(chunk.item));
    }
  }

  static Value known(const Value& module, const char* name) {
    return Value::global_of(module, Value(name));
  }

  static Value call(const Value& callable, Value::List arguments) {
    return Value::object({.callable = callable, .arguments = Value::tuple(std::move(arguments))});
  }

  // cls.__new__(cls) with attributes; without any there is no state.
  static Value instance(const Value& cls, std::vector<Value::Pair> attributes) {
    Object object{.callable = cls, .arguments = Value::tuple(), .by_new = true};
    if (!attributes.empty()) object.state = Value::dict(std::move(attributes));
    return Value::object(std::move(object));
  }

  Value size_of(const Shape& shape) const {
    return call(size_class_, {Value::tuple(Value::List(shape.begin(), shape.end()))});
  }

  Value tensor_of(const Entry& entry) {
    Value::List chunks;
    chunks.reserve(entry.chunks.size());
    for (const Chunk& chunk : entry.chunks) {
      chunks.push_back(instance(chunk_class_, {{offsets_, size_of(chunk.box.offsets)},
                                               {sizes_, size_of(chunk.box.sizes)}}));
    }
    return instance(tensor_class_, {{properties_, properties_of(entry)},
                                    {size_, size_of(entry.shape)},
                                    {chunks_, Value::list(std::move(chunks))}});
  }

  Value properties_of(const Entry& entry) {
    Object object{.callable = properties_class_, .arguments = Value::tuple(), .by_new = true};
    const Value dtype = known(torch_, std::string(to_string(entry.dtype)).c_str());
    object.state = Value::tuple({dtype, strided_, entry.requires_grad, contiguous_, false});
    return Value::object(std::move(object));
  }

  // An integer is the index of a list to PyTorch: keys are strings.
  static Value step_of(const PathPart& part) {
    const auto* index = std::get_if<std::int64_t>(&part);
    return index != nullptr ? Value(*index) : Value(step_text(part));
  }

  static Value path_of(const Entry& entry, const Value& name) {
    if (!entry.path) return Value::tuple({name});
    Value::List steps;
    std::ranges::transform(*entry.path, std::back_inserter(steps), step_of);
    return Value::tuple(std::move(steps));
  }

  Value index_of(const Value& name, const Shape* offset, Value number) {
    std::vector<Value::Pair> attributes = {{fqn_, name}, {index_, std::move(number)}};
    if (offset != nullptr) attributes.emplace_back(offset_, size_of(*offset));
    return instance(index_class_, std::move(attributes));
  }

  Value info_of(const Item& item) {
    if (path_.is(Value::Kind::none) || path_.as_string() != item.path) path_ = Value(item.path);
    std::vector<Value::Pair> attributes = {{relative_path_, path_},
                                           {offset_, Value(narrow<std::int64_t>(item.offset))},
                                           {length_, Value(narrow<std::int64_t>(item.length))}};
    if (!item.transforms.empty()) {
      attributes.emplace_back(
          "transform_descriptors",
          Value::list(Value::List(item.transforms.begin(), item.transforms.end())));
    }
    return instance(info_class_, std::move(attributes));
  }

  Value storage_meta_of(const Metadata& metadata) const {
    if (metadata.checkpoint_id.empty() && metadata.save_id.empty()) return {};
    return instance(known(metadata_module_, "StorageMeta"),
                    {{"checkpoint_id", text_or_none(metadata.checkpoint_id)},
                     {"save_id", text_or_none(metadata.save_id)},
                     {"load_id", Value()},
                     {"modules", Value::list()}});
  }

  const Value metadata_module_ = kMetadataModule;
  const Value torch_ = "torch";
  const Value tensor_class_ = known(metadata_module_, "TensorStorageMetadata");
  const Value bytes_class_ = known(metadata_module_, "BytesStorageMetadata");
  const Value chunk_class_ = known(metadata_module_, "ChunkStorageMetadata");
  const Value properties_class_ = known(metadata_module_, "TensorProperties");
  const Value index_class_ = known(metadata_module_, "MetadataIndex");
  const Value info_class_ = known(Value(kFilesystemModule), "_StorageInfo");
  const Value size_class_ = known(torch_, "Size");
  const Value strided_ =
      call(Value::global("torch.serialization", "_get_layout"), {Value("torch.strided")});
  const Value contiguous_ = call(known(metadata_module_, "_MEM_FORMAT_ENCODING"), {Value(0)});
  const Value properties_ = "properties";
  const Value size_ = "size";
  const Value chunks_ = "chunks";
  const Value offsets_ = "offsets";
  const Value sizes_ = "sizes";
  const Value fqn_ = "fqn";
  const Value index_ = "index";
  const Value offset_ = "offset";
  const Value relative_path_ = "relative_path";
  const Value length_ = "length";
  Value path_;  // of the item before, which most often is the same
};

}  // namespace

std::vector<std::byte> encode(const Metadata& metadata) {
  return Encoder().run(metadata);
}

}  // namespace tessera::dcp
