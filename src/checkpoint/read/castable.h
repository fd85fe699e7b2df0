// Whether a read may change the type of elements.
#pragma once

#include "tessera/dtype.h"

namespace tessera {

// Throws `mismatch` when elements of `have` may not become `want` without the permission that is
// missing, and `unsupported` when there is no conversion. Permissions are those of LoadOptions.
void require_castable(DType have, DType want, bool allow_cast, bool allow_wrap);

}  // namespace tessera
