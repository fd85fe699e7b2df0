#include "checkpoint/save/plan_source.h"

#include <utility>

#include "checkpoint/dcp/zstd_sink.h"
#include "checkpoint/save/data_file.h"

namespace tessera {

PlanSource::PlanSource(const SavePlan& plan, dcp::Origin origin, std::string attempt, ItemEnds ends)
    : plan_(plan),
      origin_(std::move(origin)),
      attempt_(std::move(attempt)),
      ends_(std::move(ends)) {
  if (plan.rules().files.are_compressed()) transforms_.emplace_back(kZstdTransform);
  for (const PlannedLeaf& leaf : plan.leaves()) {
    heads_.push_back(
        {leaf.name, leaf.path, leaf.is_tensor, leaf.dtype, leaf.shape, leaf.requires_grad});
  }
}

void PlanSource::for_each_chunk(std::size_t entry, const ChunkVisitor& visit) const {
  plan_.boxes(entry, [&](const Box& box) { visit(box.offsets, box.sizes); });
}

void PlanSource::for_each_item(std::size_t entry, const ItemVisitor& visit) const {
  // Entries are asked for in their order; where that is not so, the walk begins again.
  if (!items_ || items_->next() > entry) items_.emplace(plan_);
  const auto pass_over = [](const Box*, int, const ItemPlace&) {};
  while (items_->next() < entry) items_->leaf(pass_over);
  items_->leaf([&](const Box* box, int rank, const ItemPlace& planned) {
    const ItemPlace place = ends_.of(rank, planned);
    const std::string name = data_file_name(rank, place.file, attempt_);
    const Numbers offsets = box == nullptr ? Numbers() : Numbers(box->offsets);
    visit(offsets, {name, place.offset, place.length, transforms_});
  });
}

}  // namespace tessera
