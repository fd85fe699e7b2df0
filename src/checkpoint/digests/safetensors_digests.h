// How the safetensors files that we write get their digests, and how readers find them.
#pragma once

#include <cstddef>
#include <memory>
#include <string_view>
#include <vector>

#include "format/safetensors/safetensors.h"
#include "io/block_digests.h"
#include "tessera/io.h"

namespace tessera {

// The digests of the data section travel in `__metadata__` (docs/formats/side-file.md).
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
