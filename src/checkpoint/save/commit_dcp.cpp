#include "checkpoint/save/commit_dcp.h"

#include <memory>
#include <span>
#include <utility>

#include "base/stop.h"
#include "checkpoint/dcp/metadata_file.h"
#include "io/block_digests.h"
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

}  // namespace

void require_no_metadata(const Store& store, const std::string& path) {
  if (store.exists(kDcpMetadata))
    throw Error(ErrorCode::already_exists, "a checkpoint is there already").at_path(path);
}

void require_no_checkpoint(const Store& store, const std::string& path) {
  require_no_metadata(store, path);
  for (const ObjectInfo& object : store.list_level()) {
    if (is_rank_metadata(object.name)) {
      throw Error(ErrorCode::already_exists,
                  "a part of a checkpoint, which a rank saved, is there already: " + object.name)
          .at_path(path);
    }
  }
}

bool is_visible(const Store& store, const std::string& save_id) {
  const Settling settling;
  return store.exists(kDcpMetadata) && read_dcp_metadata(store).save_id == save_id;
}

Replaced metadata_version(const Store& store) {
  if (!store.exists(kDcpMetadata)) return std::nullopt;
  return store.open(kDcpMetadata)->version();
}

CommittedFiles commit_dcp(Store& store, const MetadataBytes& metadata, Commit commit) {
  // The side file comes first, and needs the digests of this: it is invisible until its commit.
  DigestSink sink(new_metadata(store, commit.replaced));
  metadata([&](ByteView bytes) { sink.write_at(sink.size(), bytes); });
  const std::uint64_t size = sink.size();
  commit.digests[std::string(kDcpMetadata)] = {size, sink.digests(), 0};
  const std::string side_file = encode_side_file(
      {commit.save_id, own_producer(), std::move(commit.digests), std::move(commit.types)});
  put(store, side_file_name(commit.save_id), bytes_of(side_file), IfExists::fail);
  if (commit.last_look) commit.last_look();
  sink.commit();
  return {2, size + side_file.size()};
}

CommittedFiles commit_dcp(Store& store, const dcp::MetadataSource& metadata, Commit commit) {
  commit.save_id = metadata.origin().save_id;
  const auto encoded = [&](const auto& write) { dcp::encode(metadata, write); };
  return commit_dcp(store, encoded, std::move(commit));
}

}  // namespace tessera
