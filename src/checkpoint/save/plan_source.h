// The `.metadata` of a save, computed while it is written: no chunk of it is stored.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "checkpoint/save/item_ends.h"
#include "checkpoint/save/save_plan.h"
#include "format/dcp/dcp.h"

namespace tessera {

class PlanSource final : public dcp::MetadataSource {
 public:
  // `plan` outlives this. Of one thread. `ends`: if the plan's files are compressed.
  PlanSource(const SavePlan& plan, dcp::Origin origin, std::string attempt, ItemEnds ends = {});

  [[nodiscard]] const dcp::Origin& origin() const override { return origin_; }
  [[nodiscard]] std::size_t entry_count() const override { return heads_.size(); }
  [[nodiscard]] const dcp::EntryHead& head(std::size_t entry) const override {
    return heads_[entry];
  }
  void for_each_chunk(std::size_t entry, const ChunkVisitor& visit) const override;
  void for_each_item(std::size_t entry, const ItemVisitor& visit) const override;

 private:
  const SavePlan& plan_;
  dcp::Origin origin_;
  std::string attempt_;
  ItemEnds ends_;
  std::vector<std::string> transforms_;  // of every item
  std::vector<dcp::EntryHead> heads_;
  mutable std::optional<SavePlan::Items> items_;  // where the entry after the last one begins
};

}  // namespace tessera
