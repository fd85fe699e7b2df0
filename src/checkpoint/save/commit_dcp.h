// The commit of a DCP save.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/read/side_file.h"
#include "checkpoint/save/messages.h"
#include "checkpoint/save/save_plan.h"
#include "format/dcp/dcp.h"
#include "io/checked_source.h"
#include "tessera/storage.h"

namespace tessera {

// Whether the checkpoint in the store is that of this save.
[[nodiscard]] bool is_visible(const Store& store, const std::string& save_id);

struct CommittedFiles {
  std::uint64_t files = 0;
  std::uint64_t bytes = 0;
};

struct Commit {
  std::string save_id;
  DigestsByName digests;  // of the data files, which are durable
  std::string types;      // as encode_types has them
  // If what is there by then is not this, another save was faster: `conflict`, or `already_exists`
  // where there was none.
  Replaced replaced;
  std::function<void()> last_look = {};  // right before the commit; may throw
};
// Gives the bytes of a `.metadata` in turn.
using MetadataBytes = std::function<void(const std::function<void(ByteView)>& write)>;

// Publishes the `.metadata` of a save. The side file becomes durable first; `.metadata` is the
// commit.
class DcpCommit {
 public:
  // Writes both. What becomes `.metadata` has no name yet, and goes with this.
  DcpCommit(Store& store, const MetadataBytes& metadata, Commit commit);
  // The `save_id` is that of `metadata`.
  DcpCommit(Store& store, const dcp::MetadataSource& metadata, Commit commit);

  void publish();
  // What it writes.
  [[nodiscard]] const CommittedFiles& files() const { return files_; }

 private:
  DigestSink metadata_;
  std::function<void()> last_look_;
  CommittedFiles files_;
};
// Both at once.
CommittedFiles commit_dcp(Store& store, const MetadataBytes& metadata, Commit commit);
CommittedFiles commit_dcp(Store& store, const dcp::MetadataSource& metadata, Commit commit);

// The places of compressed items. Nobody knows how long these are before they are written, so ranks
// tell it with the reports of their files.

// On rank 0; 8 bytes for each item, and as much for each file.
class ItemEnds {
 public:
  // Nothing is compressed.
  ItemEnds() = default;
  // Takes the lengths over. The reports are those that were planned (require_planned).
  explicit ItemEnds(Reports& reports);

  // The place of the item that has this place in the plan.
  [[nodiscard]] ItemPlace of(int rank, const ItemPlace& planned) const;

 private:
  struct Rank {
    std::vector<std::uint64_t> ends;    // of all its files' items, each counted from its file
    std::vector<std::uint64_t> firsts;  // for each file, which of `ends` is the first
  };
  std::vector<Rank> ranks_;
};

// The `.metadata` of a save, computed while it is written: no chunk of it is stored.

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
