#include "checkpoint/write/fingerprint.h"

#include <sys/stat.h>

#include <filesystem>
#include <span>
#include <string_view>

#include "base/digest.h"
#include "base/one_of.h"
#include "checkpoint/digests/side_file.h"

namespace tessera {
namespace {

// A digest of fields, each behind its length, so that none runs into the next.
class Fields {
 public:
  Fields& add(std::string_view text) {
    const std::string size = std::to_string(text.size()) + ":";
    digest_.add(std::as_bytes(std::span(size)));
    digest_.add(std::as_bytes(std::span(text)));
    return *this;
  }
  template <typename Number>
  requires std::is_arithmetic_v<Number> || std::is_enum_v<Number> Fields& add(Number number) {
    return add(std::string_view(std::to_string(static_cast<std::int64_t>(number))));
  }
  template <typename Item>
  Fields& add(const std::optional<Item>& item) {
    add(item.has_value());
    return item ? add(*item) : *this;
  }
  template <typename Item>
  Fields& add(const std::vector<Item>& items) {
    add(items.size());
    for (const Item& item : items) add(item);
    return *this;
  }
  [[nodiscard]] std::uint64_t value() const { return digest_.value(); }

 private:
  RunningDigest digest_;
};

// False: it is not there.
bool add_file(Fields& fields, const std::string& path, const std::string& name) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) return false;
  fields.add(name).add(status.st_size).add(status.st_mtim.tv_sec).add(status.st_mtim.tv_nsec);
  return true;
}

void add_piece(Fields& fields, const Piece& piece) {
  fields.add(to_string(piece.slice)).add(piece.storage_offset).add(piece.strides);
  fields.add(piece.conj).add(piece.neg);
  if (!piece.storage) return;
  const Storage& storage = *piece.storage;
  fields.add(storage.source ? storage.source->name() : std::string());
  fields.add(storage.offset).add(storage.size).add(storage.encoding).add(storage.crc32);
}

void add_leaf(Fields& fields, const Leaf& leaf) {
  fields.add(leaf.name);
  if (!leaf.value.is(Value::Kind::tensor)) return;
  const Tensor& tensor = leaf.value.as_tensor();
  fields.add(tensor.dtype).add(tensor.stored).add(tensor.shape).add(tensor.pieces.size());
  for (const Piece& piece : tensor.pieces) add_piece(fields, piece);
}

void add_options(Fields& fields, const ConvertOptions& options) {
  fields.add(options.to).add(options.ranks).add(options.olmo.unit).add(options.olmo.orig_params);
  fields.add(options.olmo.safetensors).add(options.olmo.model_only).add(options.olmo.config);
  fields.add(options.only).add(options.rename).add(options.dtype).add(options.dequantize);
  fields.add(options.max_shard_size).add(options.keep_duplicates);
  for (const auto& [name, file] : options.file_of) fields.add(name).add(file);
  // Of one rank's DCP files there are as many as threads.
  const bool by_thread = is_one_of(options.to, CheckpointKind::dcp, CheckpointKind::olmo_torch_new);
  fields.add(by_thread ? options.threads : 0);
}

}  // namespace

std::uint64_t fingerprint_of(const Checkpoint& source, const std::vector<Leaf>& leaves,
                             const std::string& target, const ConvertOptions& options) {
  namespace fs = std::filesystem;
  Fields fields;
  fields.add(own_producer()).add(fs::path(target).filename().string());
  fields.add(source.kind).add(fs::weakly_canonical(source.path).string());
  for (const ObjectInfo& file : source.files) {
    add_file(fields, source.store->name() + "/" + file.name, file.name);
  }
  fields.add(leaves.size());
  for (const Leaf& leaf : leaves) add_leaf(fields, leaf);
  add_options(fields, options);
  return fields.value();
}

std::optional<std::uint64_t> identity_of(const std::string& directory,
                                         const std::vector<std::string>& names) {
  Fields fields;
  for (const std::string& name : names) {
    const std::string path = std::filesystem::path(directory) / name;
    if (!add_file(fields, path, name)) return std::nullopt;
  }
  return fields.value();
}

}  // namespace tessera
