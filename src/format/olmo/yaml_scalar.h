// What a plain YAML scalar is, by the rules of PyYAML (YAML 1.1) as OmegaConf changes them.
#pragma once

#include <string_view>

#include "tessera/value.h"

namespace tessera::olmo {

// None, a bool, an integer, a real, or the text itself. Throws `limit` for an integer of more than
// 4300 digits, or of more than 64 bits in a base other than ten.
[[nodiscard]] Value plain_scalar(std::string_view text);

}  // namespace tessera::olmo
