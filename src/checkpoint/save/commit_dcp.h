// The commit of a DCP save.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "checkpoint/digests/side_file.h"
#include "format/dcp/dcp.h"
#include "tessera/storage.h"

namespace tessera {

// Throws `already_exists` at `path` when the store holds a checkpoint that was saved together.
void require_no_metadata(const Store& store, const std::string& path);
// The same, and when it holds parts that ranks saved each for itself (save_part.h): readers would
// take the new one for them.
void require_no_checkpoint(const Store& store, const std::string& path);
// Whether the checkpoint in the store is that of this save.
[[nodiscard]] bool is_visible(const Store& store, const std::string& save_id);

// The version of the `.metadata` that a commit replaces; empty where the store knows no versions.
// None: there is none.
using Replaced = std::optional<std::string>;
[[nodiscard]] Replaced metadata_version(const Store& store);

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
// commit. Returns what it wrote.
CommittedFiles commit_dcp(Store& store, const MetadataBytes& metadata, Commit commit);
// The `save_id` is that of `metadata`.
CommittedFiles commit_dcp(Store& store, const dcp::MetadataSource& metadata, Commit commit);

}  // namespace tessera
