#include <algorithm>
#include <map>
#include <set>

#include "base/checked.h"
#include "checkpoint/lazy_source.h"
#include "checkpoint/open.h"
#include "format/torch/torch_file.h"
#include "tessera/error.h"

namespace tessera {
namespace {

// The data files that `.metadata` names, each opened at its first read.
class DataFiles {
 public:
  explicit DataFiles(std::shared_ptr<Store> store) : store_(std::move(store)) {
    for (ObjectInfo& object : store_->list()) sizes_.emplace(object.name, object.size);
  }

  // The source of an item, after proving that the file is there and holds it.
  std::shared_ptr<const ByteSource> at(const dcp::Item& item, const std::string& key) {
    const auto size = sizes_.find(item.path);
    if (size == sizes_.end()) {
      throw Error(ErrorCode::incomplete, "a data file that .metadata names is missing")
          .at_path(store_->name() + "/" + item.path)
          .at_key(key);
    }
    const std::uint64_t end = checked_add(item.offset, item.length);
    if (end > size->second) {
      throw Error(ErrorCode::incomplete, "the data file has " + std::to_string(size->second) +
                                             " bytes, an item reaches to " + std::to_string(end))
          .at_path(store_->name() + "/" + item.path)
          .at_key(key)
          .at_offset(item.offset);
    }
    auto& source = sources_[item.path];
    if (!source) {
      source = std::make_shared<LazySource>(store_, ObjectInfo{item.path, size->second}, open_);
    }
    return source;
  }

  // Those that were asked for, sorted by name.
  [[nodiscard]] std::vector<ObjectInfo> used() const {
    std::vector<ObjectInfo> files;
    for (const auto& [name, source] : sources_) files.push_back({name, source->size()});
    return files;
  }

 private:
  std::shared_ptr<Store> store_;
  std::shared_ptr<OpenFiles> open_ = std::make_shared<OpenFiles>();
  std::map<std::string, std::uint64_t> sizes_;
  std::map<std::string, std::shared_ptr<const ByteSource>> sources_;
};

Encoding encoding_of(const dcp::Item& item, const std::string& key) {
  if (item.transforms.empty()) return Encoding::torch_item;
  throw Error(ErrorCode::unsupported,
              "the item went through the stream extension '" + item.transforms.front() + "'")
      .at_path(item.path)
      .at_key(key);
}

Value tensor_leaf(const dcp::Entry& entry, DataFiles& files) {
  Tensor tensor;
  tensor.dtype = entry.dtype;
  tensor.shape = entry.shape;
  tensor.requires_grad = entry.requires_grad;
  for (const dcp::Chunk& chunk : entry.chunks) {
    // Empty chunks hold nothing to read (P-18); an empty tensor keeps its first one.
    if (numel(chunk.box.sizes) == 0 && (numel(entry.shape) > 0 || !tensor.pieces.empty())) continue;
    auto storage = std::make_shared<Storage>();
    storage->source = files.at(chunk.item, entry.name);
    storage->offset = chunk.item.offset;
    storage->size = chunk.item.length;
    storage->encoding = encoding_of(chunk.item, entry.name);
    storage->dtype = entry.dtype;
    tensor.pieces.push_back(Piece{chunk.box, std::move(storage), 0, {}, -1});
  }
  return Value(std::move(tensor));
}

Value bytes_leaf(const dcp::Entry& entry, DataFiles& files) {
  (void)encoding_of(entry.item, entry.name);
  const auto source = files.at(entry.item, entry.name);
  return torch_file::read(slice_source(source, entry.item.offset, entry.item.length));
}

// The number of ranks, from file names `__{rank}_{n}...`; 0 when the names say nothing.
int world_size_of(const std::vector<ObjectInfo>& files) {
  std::set<int> ranks;
  for (const ObjectInfo& file : files) {
    int rank = -1;
    if (std::sscanf(file.name.c_str(), "__%d_", &rank) == 1 && rank >= 0) ranks.insert(rank);
  }
  return ranks.empty() ? 0 : *ranks.rbegin() + 1;
}

}  // namespace

dcp::Metadata read_dcp_metadata(const Store& store) {
  const auto source = store.open(kDcpMetadata);
  try {
    return dcp::decode(read_all(*source, kMetadataLimit));
  } catch (Error& error) {
    throw error.at_path(source->name());
  }
}

Checkpoint open_dcp(std::shared_ptr<Store> store) {
  const dcp::Metadata metadata = read_dcp_metadata(*store);
  Checkpoint checkpoint;
  checkpoint.kind = CheckpointKind::dcp;
  checkpoint.path = store->name();
  checkpoint.producer =
      metadata.version.empty() ? "" : "torch.distributed.checkpoint " + metadata.version;
  checkpoint.save_id = metadata.save_id;
  DataFiles files(store);
  for (const dcp::Entry& entry : metadata.entries) {
    try {
      Leaf leaf;
      leaf.name = entry.name;
      leaf.path = entry.path ? *entry.path : Path{entry.name};
      leaf.value = entry.is_tensor ? tensor_leaf(entry, files) : bytes_leaf(entry, files);
      checkpoint.leaves.push_back(std::move(leaf));
    } catch (Error& error) {
      throw error.at_key(entry.name);
    }
  }
  checkpoint.files = files.used();
  checkpoint.world_size = world_size_of(checkpoint.files);
  checkpoint.files.insert(checkpoint.files.begin(),
                          {std::string(kDcpMetadata), store->open(kDcpMetadata)->size()});
  checkpoint.store = std::move(store);
  require_coverage(checkpoint);
  return checkpoint;
}

}  // namespace tessera
