#include "checkpoint/write/write_item.h"

#include <algorithm>
#include <utility>

#include "checkpoint/tree/tree_json.h"
#include "layout/boxes.h"

namespace tessera {
namespace {

bool has_rows(const Tensor& tensor) {
  return !tensor.shape.empty() && numel(tensor.shape) > 0;
}

dcp::EntryHead head_of(const Leaf& leaf) {
  dcp::EntryHead head;
  head.name = leaf.name;
  head.path = leaf.path;
  head.is_tensor = leaf.value.is(Value::Kind::tensor);
  if (!head.is_tensor) return head;
  const Tensor& tensor = leaf.value.as_tensor();
  head.dtype = tensor.dtype;
  head.shape = tensor.shape;
  head.requires_grad = tensor.requires_grad;
  return head;
}

}  // namespace

Shares::Shares(const std::vector<Leaf>& leaves, int ranks)
    : leaves_(leaves), of_ranks_(static_cast<std::size_t>(ranks)) {
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    if (is_empty_dict(leaves[i])) continue;  // the side file has it
    of_ranks_[0].push_back(i);
    if (!leaves[i].value.is(Value::Kind::tensor)) continue;
    const Tensor& tensor = leaves[i].value.as_tensor();
    if (!has_rows(tensor)) continue;
    const std::int64_t rows = tensor.shape[0];
    for (int rank = 1; rank < ranks && chunk_begin(rows, ranks, rank) < rows; ++rank)
      of_ranks_[static_cast<std::size_t>(rank)].push_back(i);
  }
}

Box Shares::part(const Tensor& tensor, std::size_t rank) const {
  if (!has_rows(tensor)) return whole(tensor.shape);
  return chunk_of(whole(tensor.shape), 0, static_cast<std::int64_t>(ranks()),
                  static_cast<std::int64_t>(rank));
}

WrittenSource::WrittenSource(const Shares& shares, const WrittenItems& written,
                             const std::vector<std::string>& files, dcp::Origin origin)
    : shares_(shares), written_(written), files_(files), origin_(std::move(origin)) {
  heads_.reserve(shares.of(0).size());
  for (const std::size_t leaf : shares.of(0)) heads_.push_back(head_of(shares.leaves()[leaf]));
}

const Tensor& WrittenSource::tensor(std::size_t entry) const {
  return shares_.leaves()[shares_.of(0)[entry]].value.as_tensor();
}

void WrittenSource::for_each_chunk(std::size_t entry, const ChunkVisitor& visit) const {
  for_each_item(entry, [&, rank = std::size_t{0}](Numbers, const dcp::ItemView&) mutable {
    const Box box = shares_.part(tensor(entry), rank++);
    visit(box.offsets, box.sizes);
  });
}

// The ranks that have a part of one tensor follow one another from the first on.
void WrittenSource::for_each_item(std::size_t entry, const ItemVisitor& visit) const {
  const std::size_t leaf = shares_.of(0)[entry];
  for (std::size_t rank = 0; rank < shares_.ranks(); ++rank) {
    const std::vector<std::size_t>& leaves = shares_.of(rank);
    const auto found = std::ranges::lower_bound(leaves, leaf);
    if (found == leaves.end() || *found != leaf) break;
    const WrittenItem& item = written_[rank][static_cast<std::size_t>(found - leaves.begin())];
    const Box box = heads_[entry].is_tensor ? shares_.part(tensor(entry), rank) : Box();
    visit(box.offsets, {files_[item.file], item.offset, item.length});
  }
}

}  // namespace tessera
