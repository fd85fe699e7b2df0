// Bytes in memory that somebody else owns, as a source.
#pragma once

#include <memory>
#include <string>

#include "tessera/io.h"

namespace tessera {

// The bytes outlive the source.
[[nodiscard]] std::shared_ptr<ByteSource> borrowed_source(ByteView bytes, std::string name);

}  // namespace tessera
