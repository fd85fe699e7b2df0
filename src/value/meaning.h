// One form for each meaning, by which values of known classes are compared.
//
// Python writes one array, path or queue in many ways: by each protocol of pickle, by the name that
// a module has in one version of numpy or Python, in either order of bytes or of dimensions.
#pragma once

#include "tessera/value.h"

namespace tessera {

// A walkable value with its known values (known.h) in one form each: those that mean the same are
// equal, however they were pickled, and wherever they are in it. Arrays of numpy are tensors there,
// of whatever order of bytes and dimensions, and share their memory with `value` where they can.
// What it gives is to be compared, and not to be written.
[[nodiscard]] Value meaning_of(const Value& value);

}  // namespace tessera
