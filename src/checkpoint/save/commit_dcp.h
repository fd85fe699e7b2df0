// The commit of a DCP save, and the message that brings its digests to the rank that commits.
#pragma once

#include <string>

#include "checkpoint/digests/side_file.h"
#include "format/dcp/dcp.h"
#include "tessera/comm.h"
#include "tessera/storage.h"

namespace tessera {

// Throws `already_exists` at `path` when the store holds a checkpoint.
void require_no_checkpoint(const Store& store, const std::string& path);

// Publishes `.metadata` of a save whose data files are durable and have these digests. The
// side file becomes durable first; `.metadata` is the commit. `metadata.save_id` is drawn here.
// `types`: as encode_types has them.
void commit_dcp(Store& store, dcp::Metadata& metadata, DigestsByName digests, std::string types,
                IfExists if_exists);

// The digests of some files as a message between ranks.
[[nodiscard]] Bytes encode_digests(const DigestsByName& digests);
[[nodiscard]] DigestsByName decode_digests(const Bytes& message);

}  // namespace tessera
