#include <algorithm>
#include <cstdio>
#include <map>

#include "checkpoint/dcp/dcp_items.h"
#include "checkpoint/dcp/guard_dcp.h"
#include "checkpoint/dcp/metadata_file.h"
#include "checkpoint/open/open.h"
#include "checkpoint/tree/tree_json.h"
#include "format/torch/names.h"
#include "tessera/error.h"

namespace tessera {
namespace {

// Takes the chunks out of the entry: there may be a million.
Value tensor_leaf(dcp::Entry& entry, DataFiles& files) {
  Tensor tensor;
  tensor.dtype = entry.dtype;
  tensor.shape = entry.shape;
  // Of types without a storage class of their own torch cannot load a plain tensor that needs a
  // gradient: a torch.save file of such a one would be lost to it, and its DCP loader drops the
  // need.
  tensor.requires_grad = entry.requires_grad && torch_file::has_storage_class(entry.dtype);
  tensor.pieces.reserve(entry.chunks.size());
  for (dcp::Chunk chunk : entry.chunks) {
    if (is_needless(chunk.box.sizes, tensor)) {
      files.pass_over(chunk.item);
      continue;
    }
    auto storage = files.chunk(entry, chunk);
    tensor.pieces.push_back(Piece{std::move(chunk.box), std::move(storage), 0, {}, -1});
  }
  entry.chunks = {};
  return Value(std::move(tensor));
}

// Of a file `__{rank}_{n}...`; -1 for other names.
int rank_of(const ObjectInfo& file) {
  int rank = -1;
  return std::sscanf(file.name.c_str(), "__%d_", &rank) == 1 ? rank : -1;
}

// The number of ranks, from file names; 0 when the names say nothing.
int world_size_of(const std::vector<ObjectInfo>& files) {
  int last = -1;
  for (const ObjectInfo& file : files) last = std::max(last, rank_of(file));
  return last + 1;
}

std::string rank_metadata(std::size_t rank) {
  return "__" + std::to_string(rank) + std::string(kDcpMetadata);
}

std::map<std::string, ObjectInfo> rank_metadata_by_name(const Store& store) {
  std::map<std::string, ObjectInfo> found;
  for (const ObjectInfo& object : store.list()) {
    if (is_rank_metadata(object.name)) found.emplace(object.name, object);
  }
  return found;
}

// The `__{rank}.metadata` of a save without collectives (checkpoint-rows P-04), in the order of
// ranks.
std::vector<ObjectInfo> rank_metadata_files(const Store& store) {
  std::vector<ObjectInfo> files;
  const std::map<std::string, ObjectInfo> found = rank_metadata_by_name(store);
  for (std::size_t rank = 0; found.contains(rank_metadata(rank)); ++rank) {
    files.push_back(found.at(rank_metadata(rank)));
  }
  if (files.size() != found.size()) {
    throw Error(ErrorCode::incomplete, "there are " + std::to_string(found.size()) +
                                           " files __{rank}.metadata, but not that of rank " +
                                           std::to_string(files.size()))
        .at_path(store.name());
  }
  return files;
}

dcp::Metadata merged_metadata(const Store& store, const std::vector<ObjectInfo>& files) {
  std::vector<dcp::Metadata> ranks;
  ranks.reserve(files.size());
  for (const ObjectInfo& file : files) ranks.push_back(read_dcp_metadata(store, file.name));
  try {
    return dcp::merge(std::move(ranks));
  } catch (Error& error) {
    throw error.at_path(store.name());
  }
}

Leaf leaf_of(dcp::Entry& entry, DataFiles& files) {
  try {
    Leaf leaf;
    leaf.name = entry.name;
    leaf.path = entry.path ? *entry.path : Path{entry.name};
    leaf.value = entry.is_tensor ? tensor_leaf(entry, files) : files.value(entry);
    return leaf;
  } catch (Error& error) {
    throw error.at_key(entry.name);
  }
}

std::vector<ObjectInfo> only_metadata_file(const Store& store) {
  return {{std::string(kDcpMetadata), store.open(kDcpMetadata)->size()}};
}

// What a directory's metadata says, and the files that say it.
struct FoundMetadata {
  std::vector<ObjectInfo> files;
  dcp::Metadata metadata;
  bool merged = false;  // from files of ranks: there is no `.metadata`
};

// `.metadata` comes first where both are, as for PyTorch's reader.
FoundMetadata find_metadata(const Store& store) {
  if (store.exists(kDcpMetadata))
    return {only_metadata_file(store), read_dcp_metadata(store), false};
  std::vector<ObjectInfo> files = rank_metadata_files(store);
  dcp::Metadata metadata = merged_metadata(store, files);
  return {std::move(files), std::move(metadata), true};
}

std::string producer_of(const dcp::Metadata& metadata) {
  return metadata.version.empty() ? "" : "torch.distributed.checkpoint " + metadata.version;
}

// Of a directory with a `.metadata`, as guard_dcp has it.
std::shared_ptr<Store> guarded(std::shared_ptr<Store> store, const dcp::Metadata& metadata,
                               std::vector<std::string>& warnings, std::string& types) {
  if (store->exists(rank_metadata(0)))
    warnings.emplace_back("__{rank}.metadata files are passed over for .metadata");
  return guard_dcp(std::move(store), metadata, warnings, types);
}

}  // namespace

Checkpoint open_dcp(std::shared_ptr<Store> store) {
  auto [metadata_files, metadata, merged] = find_metadata(*store);
  Checkpoint checkpoint;
  checkpoint.kind = CheckpointKind::dcp;
  checkpoint.path = store->name();
  checkpoint.producer = producer_of(metadata);
  checkpoint.save_id = metadata.save_id;
  checkpoint.warnings = metadata.warnings;
  std::string types;
  if (!merged) store = guarded(std::move(store), metadata, checkpoint.warnings, types);
  DataFiles files(store);
  for (dcp::Entry& entry : metadata.entries) checkpoint.leaves.push_back(leaf_of(entry, files));
  files.require_apart();
  if (!types.empty()) add_types(types, checkpoint.leaves);
  checkpoint.has_types = !types.empty();
  warn_of_holes(fill_holes(checkpoint.leaves), checkpoint.warnings);
  checkpoint.files = files.used();
  if (merged) {
    // The replicas of higher ranks are not read: their files go on.
    checkpoint.world_size = static_cast<int>(metadata_files.size());
  } else {
    checkpoint.world_size = world_size_of(checkpoint.files);
    const std::vector<std::string> more = files.warnings();
    checkpoint.warnings.insert(checkpoint.warnings.end(), more.begin(), more.end());
  }
  checkpoint.files.insert(checkpoint.files.begin(), metadata_files.begin(), metadata_files.end());
  checkpoint.store = std::move(store);
  require_coverage(checkpoint);
  return checkpoint;
}

}  // namespace tessera
