#include "checkpoint/read/castable.h"

#include <string>

#include "checkpoint/read/cast.h"
#include "tessera/error.h"

namespace tessera {

void require_castable(DType have, DType want, bool allow_cast, bool allow_wrap) {
  if (have == want) return;
  const std::string both =
      std::string(to_string(have)) + ", wanted " + std::string(to_string(want));
  if (!allow_cast) throw Error(ErrorCode::mismatch, "the checkpoint's dtype is " + both);
  if (!can_cast(have, want)) {
    throw Error(ErrorCode::unsupported,
                "no conversion between these: the checkpoint's dtype is " + both);
  }
  if (can_wrap(have, want) && !allow_wrap) {
    throw Error(ErrorCode::mismatch,
                "allow_wrap is needed, what does not fit would become another number: the "
                "checkpoint's dtype is " +
                    both);
  }
}

}  // namespace tessera
