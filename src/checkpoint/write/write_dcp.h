// The items that a conversion writes into a DCP checkpoint, and the `.metadata` of them. Nothing
// here is kept for each chunk but where it was written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "format/dcp/dcp.h"
#include "tessera/leaf.h"

namespace tessera {

// Which leaves each rank of the target has an item of: the rows of tensors are shared by
// torch.chunk's rule, and what has no rows is the first rank's.
class Shares {
 public:
  // `leaves` outlives this.
  Shares(const std::vector<Leaf>& leaves, int ranks);

  [[nodiscard]] const std::vector<Leaf>& leaves() const { return leaves_; }
  [[nodiscard]] std::size_t ranks() const { return of_ranks_.size(); }
  // Indices of leaves, ascending.
  [[nodiscard]] const std::vector<std::size_t>& of(std::size_t rank) const {
    return of_ranks_[rank];
  }
  // What the rank has of a tensor.
  [[nodiscard]] Box part(const Tensor& tensor, std::size_t rank) const;

 private:
  const std::vector<Leaf>& leaves_;
  std::vector<std::vector<std::size_t>> of_ranks_;
};

// The place where an item ended up.
struct WrittenItem {
  std::size_t file = 0;  // number of its data file
  std::uint64_t offset = 0;
  std::uint64_t length = 0;
};
using WrittenItems = std::vector<std::vector<WrittenItem>>;  // by rank, in the order of its leaves

// The `.metadata` of what was written: entries in the order of the leaves, chunks in rank order.
class WrittenSource final : public dcp::MetadataSource {
 public:
  // All of these outlive this; `files` are the names of the data files.
  WrittenSource(const Shares& shares, const WrittenItems& written,
                const std::vector<std::string>& files, dcp::Origin origin);

  [[nodiscard]] const dcp::Origin& origin() const override { return origin_; }
  [[nodiscard]] std::size_t entry_count() const override { return heads_.size(); }
  [[nodiscard]] const dcp::EntryHead& head(std::size_t entry) const override {
    return heads_[entry];
  }
  void for_each_chunk(std::size_t entry, const ChunkVisitor& visit) const override;
  void for_each_item(std::size_t entry, const ItemVisitor& visit) const override;

 private:
  [[nodiscard]] const Tensor& tensor(std::size_t entry) const;

  const Shares& shares_;
  const WrittenItems& written_;
  const std::vector<std::string>& files_;
  dcp::Origin origin_;
  std::vector<dcp::EntryHead> heads_;  // of the first rank's leaves, which are all
};

}  // namespace tessera
