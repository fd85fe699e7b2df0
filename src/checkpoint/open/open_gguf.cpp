// GGUF files (docs/formats/gguf.md).
#include <memory>
#include <string>
#include <utility>

#include "checkpoint/open/directory.h"
#include "checkpoint/open/open.h"
#include "format/gguf/gguf.h"
#include "storage/lazy_source.h"
#include "tessera/error.h"
#include "value/render.h"

namespace tessera {
namespace {

constexpr std::string_view kSplitCount = "split.count";

// A step below one of the two dicts that hold what is no tensor.
Leaf leaf_below(std::string_view dict, const std::string& key, Value value) {
  Path path{std::string(dict), key};
  std::string name = dotted(path);
  return {std::move(name), std::move(path), std::move(value)};
}

// Two leaves of one name, or a leaf where a dict is, would be no tree.
void require_free(const std::string& name) {
  for (const std::string_view dict : {gguf::kValuesDict, gguf::kTypesDict}) {
    if (name != dict && !name.starts_with(std::string(dict) + ".")) continue;
    throw Error(ErrorCode::conflict, "a tensor has a name that is kept for the file's key-values");
  }
}

// Blocks as the bytes that they are: a row of the tensor is a row of bytes.
Tensor tensor_of(const gguf::Entry& entry, const std::shared_ptr<const ByteSource>& source) {
  auto storage = std::make_shared<Storage>();
  storage->source = source;
  storage->offset = entry.begin;
  storage->size = entry.end - entry.begin;
  storage->dtype = entry.type->dtype.value_or(DType::uint8);
  Tensor tensor;
  tensor.dtype = storage->dtype;
  tensor.shape = entry.shape;
  if (!entry.type->dtype)
    tensor.shape.back() = tensor.shape.back() / entry.type->elements * entry.type->bytes;
  tensor.pieces.push_back(Piece{whole(tensor.shape), std::move(storage), 0, {}, -1});
  return tensor;
}

void add_leaves(gguf::Header& header, const std::shared_ptr<const ByteSource>& source,
                Checkpoint& checkpoint) {
  for (auto& [key, value] : header.values)
    checkpoint.leaves.push_back(leaf_below(gguf::kValuesDict, key, std::move(value)));
  for (const gguf::Entry& entry : header.entries) {
    if (entry.type->dtype) continue;
    checkpoint.leaves.push_back(leaf_below(gguf::kTypesDict, entry.name, entry.type->name));
  }
  for (gguf::Entry& entry : header.entries) {
    try {
      require_free(entry.name);
    } catch (Error& error) {
      throw error.at_path(source->name()).at_key(entry.name);
    }
    Tensor tensor = tensor_of(entry, source);
    Path path{entry.name};
    checkpoint.leaves.push_back({std::move(entry.name), std::move(path), Value(std::move(tensor))});
  }
}

void settle_trailing(const gguf::Header& header, const ObjectInfo& file, const OpenOptions& options,
                     Checkpoint& checkpoint) {
  if (header.trailing == 0) return;
  const std::string found = std::to_string(header.trailing) + " bytes after the last tensor";
  if (!accepts(options, kTrailingBytes)) {
    throw Error(ErrorCode::corrupt, found + "; --accept trailing-bytes passes over them")
        .at_path(checkpoint.path)
        .at_offset(file.size - header.trailing);
  }
  remark({{file.name, FileState::used, found + " are passed over", file.size}}, checkpoint);
}

// The files of a split model know their number, and each is a whole file.
void warn_of_split(const gguf::Header& header, Checkpoint& checkpoint) {
  for (const auto& [key, value] : header.values) {
    if (key != kSplitCount || !value.is(Value::Kind::integer) || value == Value(1)) continue;
    checkpoint.warnings.push_back("one of the " + render(value) +
                                  " files of a split model: the others have tensors, too");
  }
}

}  // namespace

Checkpoint open_gguf(std::shared_ptr<Store> store, const ObjectInfo& file,
                     const OpenOptions& options) {
  Checkpoint checkpoint;
  checkpoint.kind = CheckpointKind::gguf;
  checkpoint.path = store->name() + "/" + file.name;
  checkpoint.files = {file};
  const auto source = std::make_shared<LazySource>(store, file);
  gguf::Header header = gguf::read_header(*source, options.header_limit);
  settle_trailing(header, file, options, checkpoint);
  warn_of_split(header, checkpoint);
  add_leaves(header, source, checkpoint);
  checkpoint.store = std::move(store);
  require_coverage(checkpoint);
  return checkpoint;
}

}  // namespace tessera
