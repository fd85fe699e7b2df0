#include "checkpoint/open/opened_dcp.h"

#include <algorithm>
#include <utility>

#include "base/parallel.h"
#include "checkpoint/dcp/dcp_items.h"
#include "checkpoint/dcp/read_catalog.h"
#include "checkpoint/open/dcp_parts.h"
#include "checkpoint/open/directory.h"
#include "checkpoint/open/open.h"
#include "checkpoint/open/tree_json.h"
#include "checkpoint/read/guard.h"
#include "checkpoint/read/missing.h"
#include "format/pickle/pickle.h"
#include "format/torch/rebuild.h"
#include "layout/boxes.h"
#include "tessera/error.h"

namespace tessera {
namespace {

std::string producer_of(const std::string& version) {
  return version.empty() ? "" : "torch.distributed.checkpoint " + version;
}

Tensor tensor_of(const dcp::EntryHead& head) {
  Tensor tensor;
  tensor.dtype = head.dtype;
  tensor.shape = head.shape;
  // Torch cannot load a plain tensor that needs a gradient if its type has no storage class of its
  // own: a torch.save file of such a one would be lost to it, and its DCP loader drops the need.
  tensor.requires_grad = head.requires_grad && torch_file::has_storage_class(head.dtype);
  return tensor;
}

void require_there(const LazySource& source) {
  try {
    source.open();
  } catch (const Error& error) {
    if (error.code() != ErrorCode::not_found) throw;
    throw Error(
        ErrorCode::conflict,
        "rank 0 has opened a checkpoint with this data file, which is not here: do the ranks "
        "look into different directories, or was the checkpoint replaced?")
        .at_path(source.name());
  }
}

}  // namespace

OpenedDcp::OpenedDcp(ByteView catalog, std::shared_ptr<Store> store, bool listed_here)
    : catalog_(catalog),
      digests_(std::make_shared<DigestsByName>(catalog_.head().digests)),
      store_(guarded_store(std::move(store), digests_)),
      listed_here_(listed_here),
      sources_(catalog_.files()) {
  const CatalogHead& head = catalog_.head();
  checkpoint_.path = store_->name();
  checkpoint_.producer = producer_of(head.version);
  checkpoint_.save_id = head.save_id;
  checkpoint_.warnings = head.warnings;
  checkpoint_.world_size = head.world_size;
  checkpoint_.files = head.metadata;
  for (const std::string& name : head.missing) checkpoint_.remarks.push_back(missing_row(name));
  for (const std::string& name : head.idle) checkpoint_.remarks.push_back({name, FileState::used});
  checkpoint_.store = store_;
  std::vector<std::pair<std::string, std::size_t>> tensors;  // names and positions
  catalog_.for_each([&](const Catalog::Entry& entry) {
    checkpoint_.leaves.push_back(leaf_of(entry));
    if (entry.head.is_tensor) tensors.emplace_back(entry.head.name, entry.chunks);
  });
  if (!head.types.empty()) add_types(head.types, checkpoint_.leaves);
  checkpoint_.has_types = !head.types.empty();
  warn_of_holes(fill_holes(checkpoint_.leaves), checkpoint_.warnings);
  find_chunks(tensors);
  index_names(checkpoint_);
}

// Leaves that were added in between have no entry; the others are in the order of the entries.
void OpenedDcp::find_chunks(const std::vector<std::pair<std::string, std::size_t>>& tensors) {
  chunks_.resize(checkpoint_.leaves.size());
  auto next = tensors.begin();
  for (std::size_t leaf = 0; leaf < chunks_.size() && next != tensors.end(); ++leaf) {
    if (checkpoint_.leaves[leaf].name == next->first) chunks_[leaf] = (next++)->second;
  }
}

Leaf OpenedDcp::leaf_of(const Catalog::Entry& entry) {
  Leaf leaf;
  leaf.name = entry.head.name;
  leaf.path = entry.head.path.value_or(Path{entry.head.name});
  if (entry.head.is_tensor) {
    leaf.value = Value(tensor_of(entry.head));
  } else if (entry.value) {
    leaf.value = pickle::read(*entry.value).value;
  } else {
    const std::shared_ptr<LazySource> file = source(entry.item->file);
    leaf.value = file->is_missing() ? missing_value(file, false) : read_value(file, *entry.item);
  }
  return leaf;
}

std::shared_ptr<LazySource>& OpenedDcp::source(std::uint32_t file) {
  std::shared_ptr<LazySource>& source = sources_.at(file);
  if (!source) {
    CatalogFile found = catalog_.file(file);
    if (found.digests) digests_->emplace(found.info.name, std::move(*found.digests));
    if (!listed_here_) found.info.version.clear();
    source = std::make_shared<LazySource>(store_, std::move(found.info), found.is_missing, open_);
  }
  return source;
}

void OpenedDcp::add_piece(Tensor& tensor, const CatalogChunks& chunks, std::size_t number) {
  const ItemRange place = chunks.place(number);
  auto storage = std::make_shared<Storage>();
  storage->source = source(place.file);
  storage->offset = place.offset;
  storage->size = place.size;
  storage->encoding = place.encoding;
  storage->dtype = tensor.dtype;
  tensor.pieces.push_back(Piece{chunks.box(number), std::move(storage), 0, {}, -1});
}

void OpenedDcp::give_pieces(std::size_t leaf) {
  if (chunks_[leaf] == 0) return;
  const CatalogChunks chunks = catalog_.chunks_at(chunks_[leaf]);
  Tensor& tensor = checkpoint_.leaves[leaf].value.as_tensor();
  tensor.pieces.clear();
  tensor.pieces.reserve(chunks.size());
  for (std::size_t i = 0; i < chunks.size(); ++i) add_piece(tensor, chunks, i);
  if (chunks.size() == 0 && numel(tensor.shape) == 0) tensor.pieces.push_back(empty_piece(tensor));
}

void OpenedDcp::give_pieces(std::size_t leaf, std::span<const Slice> wanted) {
  if (chunks_[leaf] == 0) return;
  const CatalogChunks chunks = catalog_.chunks_at(chunks_[leaf]);
  Tensor& tensor = checkpoint_.leaves[leaf].value.as_tensor();
  tensor.pieces.clear();
  std::vector<Box> bounds;
  for (const Slice& slice : wanted) {
    if (numel(slice) > 0) bounds.push_back(bounds_of(slice, tensor.shape));
  }
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    const auto meets = [&](const Box& box) { return chunks.meets(i, box); };
    if (std::ranges::any_of(bounds, meets)) add_piece(tensor, chunks, i);
  }
}

void OpenedDcp::give_all() {
  for (std::size_t leaf = 0; leaf < chunks_.size(); ++leaf) give_pieces(leaf);
  // Also of those that hold values alone, which the catalog has read.
  for (std::uint32_t file = 0; file < catalog_.files(); ++file) (void)source(file);
  std::vector<ObjectInfo> files;
  for (std::size_t i = 0; i < catalog_.files(); ++i) {
    CatalogFile file = catalog_.file(i);
    if (!file.is_missing) files.push_back(std::move(file.info));
  }
  std::ranges::sort(files, {}, &ObjectInfo::name);
  checkpoint_.files.insert(checkpoint_.files.end(), files.begin(), files.end());
}

void OpenedDcp::require_same_metadata() const {
  const auto source = store_->open(catalog_.head().metadata.front().name);
  if (is_metadata_of(catalog_.head(), *source)) return;
  throw Error(ErrorCode::conflict, "it is not the file that rank 0 has opened")
      .at_path(source->name());
}

void OpenedDcp::require_files(int threads) const {
  bool is_known = true;
  std::vector<const LazySource*> used;
  for (std::size_t i = 0; i < sources_.size(); ++i) {
    if (!sources_[i] || sources_[i]->is_missing()) continue;
    const CatalogFile file = catalog_.file(i);
    is_known = is_known && (is_attempt_name(file.info.name) || file.digests);
    used.push_back(sources_[i].get());
  }
  // More would be closed again before they are read.
  const std::size_t opened = std::min(used.size(), OpenFiles::kCapacity);
  parallel_for(threads, opened, [&](std::size_t i) { require_there(*used[i]); });
  if (!is_known) require_same_metadata();
}

bool is_dcp_directory(const Place& place) {
  return !place.object && place.store->exists(kDcpMetadata);
}

Checkpoint open_dcp(std::shared_ptr<Store> store, const OpenOptions& options) {
  const Bytes catalog = read_catalog(store, options.partial);
  OpenedDcp opened(catalog, std::move(store), true);
  opened.give_all();
  Checkpoint checkpoint = std::move(opened.checkpoint());
  add_beside(options, checkpoint);
  return checkpoint;
}

}  // namespace tessera
