#include <algorithm>
#include <map>
#include <set>

#include "checkpoint/dcp/dcp_items.h"
#include "checkpoint/dcp/guard_dcp.h"
#include "checkpoint/dcp/metadata_file.h"
#include "checkpoint/open/open.h"
#include "checkpoint/tree/tree_json.h"
#include "format/torch/names.h"
#include "tessera/error.h"

namespace tessera {
namespace {

// Takes the boxes out of the entry: there may be a million.
Value tensor_leaf(dcp::Entry& entry, DataFiles& files) {
  Tensor tensor;
  tensor.dtype = entry.dtype;
  tensor.shape = entry.shape;
  // Of types without a storage class of their own torch cannot load a plain tensor that needs a
  // gradient: a torch.save file of such a one would be lost to it, and its DCP loader drops the
  // need.
  tensor.requires_grad = entry.requires_grad && torch_file::has_storage_class(entry.dtype);
  tensor.pieces.reserve(entry.chunks.size());
  for (dcp::Chunk& chunk : entry.chunks) {
    // Empty chunks hold nothing to read (P-18); an empty tensor keeps its first one.
    if (numel(chunk.box.sizes) == 0 && (numel(entry.shape) > 0 || !tensor.pieces.empty())) {
      files.pass_over(chunk.item);
      continue;
    }
    auto storage = files.chunk(entry, chunk);
    tensor.pieces.push_back(Piece{std::move(chunk.box), std::move(storage), 0, {}, -1});
  }
  entry.chunks = {};
  return Value(std::move(tensor));
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

std::string rank_metadata(std::size_t rank) {
  return "__" + std::to_string(rank) + std::string(kDcpMetadata);
}

// The `__{rank}.metadata` of a save without collectives (P-04), in the order of ranks.
std::vector<ObjectInfo> rank_metadata_files(const Store& store) {
  std::vector<ObjectInfo> files;
  std::map<std::string, ObjectInfo> found;
  for (const ObjectInfo& object : store.list()) {
    if (object.name.starts_with("__") && object.name.ends_with(kDcpMetadata))
      found.emplace(object.name, object);
  }
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

}  // namespace

Checkpoint open_dcp(std::shared_ptr<Store> store) {
  // `.metadata` comes first where both are, as for PyTorch's reader.
  const bool merged = !store->exists(kDcpMetadata);
  const std::vector<ObjectInfo> metadata_files =
      merged ? rank_metadata_files(*store) : only_metadata_file(*store);
  dcp::Metadata metadata =
      merged ? merged_metadata(*store, metadata_files) : read_dcp_metadata(*store);
  Checkpoint checkpoint;
  checkpoint.kind = CheckpointKind::dcp;
  checkpoint.path = store->name();
  checkpoint.producer =
      metadata.version.empty() ? "" : "torch.distributed.checkpoint " + metadata.version;
  checkpoint.save_id = metadata.save_id;
  checkpoint.warnings = metadata.warnings;
  if (!merged && store->exists(rank_metadata(0))) {
    checkpoint.warnings.emplace_back("__{rank}.metadata files are passed over for .metadata");
  }
  std::string types;
  if (!merged) store = guard_dcp(std::move(store), metadata, checkpoint.warnings, types);
  DataFiles files(store);
  for (dcp::Entry& entry : metadata.entries) checkpoint.leaves.push_back(leaf_of(entry, files));
  files.require_apart();
  if (!types.empty()) add_types(types, checkpoint.leaves);
  checkpoint.has_types = !types.empty();
  warn_of_holes(fill_holes(checkpoint.leaves), checkpoint.warnings);
  checkpoint.files = files.used();
  // Of a merged save the replicas of higher ranks are not read: their files go on.
  checkpoint.world_size =
      merged ? static_cast<int>(metadata_files.size()) : world_size_of(checkpoint.files);
  if (!merged) {
    const std::vector<std::string> more = files.warnings();
    checkpoint.warnings.insert(checkpoint.warnings.end(), more.begin(), more.end());
  }
  checkpoint.files.insert(checkpoint.files.begin(), metadata_files.begin(), metadata_files.end());
  checkpoint.store = std::move(store);
  require_coverage(checkpoint);
  return checkpoint;
}

}  // namespace tessera
