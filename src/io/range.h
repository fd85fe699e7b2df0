// The range check that every source makes.
#pragma once

#include <string>

#include "tessera/error.h"
#include "tessera/io.h"

namespace tessera {

// Throws `incomplete` when the source ends before `offset + size`. `origin` is where the source
// begins in the object that it is named after.
inline void require_range(const ByteSource& source, std::uint64_t offset, std::uint64_t size,
                          std::uint64_t origin = 0) {
  const std::uint64_t have = source.size();
  if (offset <= have && size <= have - offset) return;
  throw Error(ErrorCode::incomplete, "found the end at byte " + std::to_string(origin + have) +
                                         ", expected " + std::to_string(size) + " bytes here")
      .at_path(source.name())
      .at_offset(origin + offset);
}

}  // namespace tessera
