#include "checkpoint/save/commit_dcp.h"

#include <span>

#include "base/random_id.h"
#include "checkpoint/dcp/metadata_file.h"
#include "io/block_digests.h"
#include "tessera/error.h"

namespace tessera {
namespace {

ByteView bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

}  // namespace

void require_no_checkpoint(const Store& store, const std::string& path) {
  if (store.exists(kDcpMetadata))
    throw Error(ErrorCode::already_exists, "a checkpoint is there already").at_path(path);
}

void commit_dcp(Store& store, dcp::Metadata& metadata, DigestsByName digests, std::string types,
                IfExists if_exists) {
  metadata.save_id = random_uuid();
  const std::vector<std::byte> bytes = dcp::encode(metadata);
  BlockDigests blocks;
  blocks.add(0, bytes);
  digests[std::string(kDcpMetadata)] = {bytes.size(), blocks.finish(bytes.size()), 0};
  const std::string side_file =
      encode_side_file({metadata.save_id, own_producer(), std::move(digests), std::move(types)});
  put(store, side_file_name(metadata.save_id), bytes_of(side_file), IfExists::fail);
  put(store, kDcpMetadata, bytes, if_exists);
}

Bytes encode_digests(const DigestsByName& digests) {
  const std::string text = encode_side_file({"", own_producer(), digests});
  const ByteView view = bytes_of(text);
  return {view.begin(), view.end()};
}

DigestsByName decode_digests(const Bytes& message) {
  return decode_side_file({reinterpret_cast<const char*>(message.data()), message.size()}).files;
}

}  // namespace tessera
