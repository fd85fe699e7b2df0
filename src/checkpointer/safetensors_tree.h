// The tree that OLMo's names in a safetensors file stand for (checkpoint-rows F-06, O-15).
#pragma once

#include "tessera/value.h"

namespace tessera::detail {

// `flat` is a dict of tensors in memory, by the names of the file. Names that are not OLMo's stay.
// Throws `conflict` if two names lead to one place.
[[nodiscard]] Value nested(const Value& flat);

}  // namespace tessera::detail
