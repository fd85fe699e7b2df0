// What lies in zstd frames, as a source.
#pragma once

#include <cstdint>
#include <memory>

#include "tessera/io.h"

namespace tessera {

// The content of the frames that make up `frames`, decompressed as it is read; memory is bounded
// whatever the size. Reading backwards begins again at the start. Throws `limit` when the content
// is longer than `cap` or needs a window of more than 16 MiB, `corrupt` for bytes that are not
// zstd, `incomplete` for a frame that ends too early.
[[nodiscard]] std::shared_ptr<const ByteSource> zstd_source(
    std::shared_ptr<const ByteSource> frames, std::uint64_t cap);

}  // namespace tessera
