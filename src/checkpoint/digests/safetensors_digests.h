// How the checkpoints that we write get their digests.
#pragma once

#include <string>
#include <vector>

#include "checkpoint/digests/side_file.h"
#include "format/dcp/dcp.h"
#include "format/safetensors/safetensors.h"
#include "io/block_digests.h"
#include "tessera/comm.h"
#include "tessera/storage.h"

namespace tessera {

// DCP: publishes `.metadata` of a save whose data files are durable and have these digests. The
// side file becomes durable first; `.metadata` is the commit. `metadata.save_id` is drawn here.
// `types`: as encode_types has them.
void commit_dcp(Store& store, dcp::Metadata& metadata, DigestsByName digests, std::string types,
                IfExists if_exists);

// The digests of some files as a message between ranks.
[[nodiscard]] Bytes encode_digests(const DigestsByName& digests);
[[nodiscard]] DigestsByName decode_digests(const Bytes& message);

// safetensors: the digests of the data section travel in `__metadata__`
// (docs/formats/side-file.md).
//
[[nodiscard]] bool is_digest_key(std::string_view key) noexcept;
// Adds the entry to a header that encode_header has not seen yet, with room for all digests.
void reserve_digests(safetensors::Header& header);
// Puts the digests of the data section, which begins where `head` ends, in their place in `head`,
// what encode_header made of that header.
void fill_digests(std::vector<std::byte>& head, const Digests& digests);
// The source of a file with this header: checked when the header has digests. Throws `corrupt` when
// the header differs from its own checksum.
[[nodiscard]] std::shared_ptr<const ByteSource> guard_safetensors(
    std::shared_ptr<const ByteSource> source, const safetensors::Header& header);

}  // namespace tessera
