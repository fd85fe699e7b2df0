// convert() where the target itself can be written, as far as its store can hold it.
#pragma once

#include "tessera/convert.h"

namespace tessera {

// Throws `invalid_argument` or `unsupported` for options that no conversion can follow, and
// `cancelled` if it is not to begin.
void require_convertible(const ConvertOptions& options);
// As convert() does, for options that one can follow. Throws `unsupported` for a directory, other
// than of DCP, in a store that has no directories which appear at once.
ConvertReport convert_in_place(const Checkpoint& source, const Location& target,
                               const ConvertOptions& options);

}  // namespace tessera
