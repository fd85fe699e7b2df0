// What lies in zstd frames, as a source.
#pragma once

#include <cstdint>
#include <memory>

#include "tessera/io.h"

namespace tessera {

// The content of the frames that make up `frames`, decompressed as it is read; memory is bounded
// whatever the size. Making it goes over all frames once and keeps both ends of the content in
// memory. Reading backwards between them begins again at the start. Throws as ZstdStream does.
[[nodiscard]] std::shared_ptr<const ByteSource> zstd_source(
    std::shared_ptr<const ByteSource> frames, std::uint64_t cap);

}  // namespace tessera
