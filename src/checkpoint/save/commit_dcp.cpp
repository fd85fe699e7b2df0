#include "checkpoint/save/commit_dcp.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <span>
#include <utility>

#include "base/parallel.h"
#include "checkpoint/dcp/item_writer.h"
#include "checkpoint/dcp/read_catalog.h"
#include "checkpoint/save/data_files.h"
#include "io/checked_source.h"
#include "tessera/error.h"

namespace tessera {
namespace {

ByteView bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

std::unique_ptr<ByteSink> new_metadata(Store& store, const Replaced& replaced) {
  if (!replaced) return store.create(kDcpMetadata, IfExists::fail);
  if (replaced->empty()) return store.create(kDcpMetadata, IfExists::replace);
  return store.replace(kDcpMetadata, *replaced);
}

Commit with_id(Commit commit, const std::string& save_id) {
  commit.save_id = save_id;
  return commit;
}

}  // namespace

bool is_visible(const Store& store, const std::string& save_id) {
  const Settling settling;
  return store.exists(kDcpMetadata) && read_dcp_metadata(store).save_id == save_id;
}

DcpCommit::DcpCommit(Store& store, const MetadataBytes& metadata, Commit commit)
    // The side file comes first, and needs the digests of this: it is invisible until its commit.
    : metadata_(new_metadata(store, commit.replaced)), last_look_(std::move(commit.last_look)) {
  metadata([this](ByteView bytes) { metadata_.write_at(metadata_.size(), bytes); });
  const std::uint64_t size = metadata_.size();
  commit.digests[std::string(kDcpMetadata)] = {size, metadata_.digests(), 0};
  const std::string side_file = encode_side_file(
      {commit.save_id, own_producer(), std::move(commit.digests), std::move(commit.types)});
  put(store, side_file_name(commit.save_id), bytes_of(side_file), IfExists::fail);
  files_ = {2, size + side_file.size()};
}

DcpCommit::DcpCommit(Store& store, const dcp::MetadataSource& metadata, Commit commit)
    : DcpCommit(
          store, [&](const auto& write) { dcp::encode(metadata, write); },
          with_id(std::move(commit), metadata.origin().save_id)) {}

void DcpCommit::publish() {
  if (last_look_) last_look_();
  metadata_.commit();
}

CommittedFiles commit_dcp(Store& store, const MetadataBytes& metadata, Commit commit) {
  DcpCommit written(store, metadata, std::move(commit));
  written.publish();
  return written.files();
}

CommittedFiles commit_dcp(Store& store, const dcp::MetadataSource& metadata, Commit commit) {
  DcpCommit written(store, metadata, std::move(commit));
  written.publish();
  return written.files();
}

ItemEnds::ItemEnds(Reports& reports) {
  for (RankReport& report : reports.ranks) {
    const auto index = static_cast<std::size_t>(report.rank);
    if (ranks_.size() <= index) ranks_.resize(index + 1);
    Rank& rank = ranks_[index];
    rank.ends = std::move(report.lengths);
    std::uint64_t first = 0;
    for (const FileReport& file : report.files) {
      const auto number = static_cast<std::size_t>(file.file);
      if (rank.firsts.size() <= number) rank.firsts.resize(number + 1);
      rank.firsts[number] = first;
      const auto begin = rank.ends.begin() + static_cast<std::ptrdiff_t>(first);
      const auto end = begin + static_cast<std::ptrdiff_t>(file.items);
      std::partial_sum(begin, end, begin);
      first += file.items;
    }
  }
}

ItemPlace ItemEnds::of(int rank, const ItemPlace& planned) const {
  if (ranks_.empty()) return planned;
  const Rank& told = ranks_.at(static_cast<std::size_t>(rank));
  const std::uint64_t at = told.firsts.at(static_cast<std::size_t>(planned.file)) + planned.number;
  ItemPlace place = planned;
  place.offset = planned.number == 0 ? 0 : told.ends.at(at - 1);
  place.length = told.ends.at(at) - place.offset;
  return place;
}

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
