// A DCP checkpoint that is opened by its catalog, whoever made that.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/dcp/catalog.h"
#include "storage/lazy_source.h"
#include "tessera/checkpoint.h"

namespace tessera {

// Its tensors have no pieces at first: a large job has millions, and a rank needs few of them.
class OpenedDcp {
 public:
  // `catalog` must outlive it, `store` is that of this rank. Nothing of the store is read, but
  // items of values that hold tensors. `listed_here`: this store told the versions of the catalog's
  // files; another rank's may show others of the same files.
  OpenedDcp(ByteView catalog, std::shared_ptr<Store> store, bool listed_here);

  [[nodiscard]] Checkpoint& checkpoint() noexcept { return checkpoint_; }

  // Gives the tensor of a leaf the pieces that hold any of the wanted elements, or all pieces, in
  // place of those that it has. Leaves that are no tensors stay as they are.
  void give_pieces(std::size_t leaf, std::span<const Slice> wanted);
  void give_pieces(std::size_t leaf);
  // All pieces of all leaves, and the list of files. After that the catalog is not needed.
  void give_all();

  // Opens the files of the pieces that were given. Throws `conflict` if this rank does not find the
  // files that the catalog tells of: it looks into another directory, or the checkpoint is gone.
  // Files without digests and with names that other saves use, too, are known by their `.metadata`.
  void require_files(int threads) const;

 private:
  Leaf leaf_of(const Catalog::Entry& entry);
  void find_chunks(const std::vector<std::pair<std::string, std::size_t>>& tensors);
  void add_piece(Tensor& tensor, const CatalogChunks& chunks, std::size_t number);
  [[nodiscard]] std::shared_ptr<LazySource>& source(std::uint32_t file);
  void require_same_metadata() const;

  Catalog catalog_;
  std::shared_ptr<DigestsByName> digests_;  // of the files that were asked for
  std::shared_ptr<Store> store_;            // guarded by them
  std::shared_ptr<OpenFiles> open_ = std::make_shared<OpenFiles>();
  bool listed_here_;
  std::vector<std::shared_ptr<LazySource>> sources_;  // by file; null: nobody asked for it
  Checkpoint checkpoint_;
  std::vector<std::size_t> chunks_;  // by leaf, for chunks_at(); 0: no tensor
};

}  // namespace tessera
