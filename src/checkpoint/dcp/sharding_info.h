// Where the tensors of a safetensors file lie in the whole tensors, as PyTorch's sharded writers
// say it (checkpoint-rows F-07).
#pragma once

#include <map>
#include <string>

#include "tessera/layout.h"

namespace tessera {

inline constexpr const char* kShardingKey = "DCP_SHARDING_INFO";  // of `__metadata__`

// First elements of the tensors, by name; empty without the entry. Throws `corrupt` when the entry
// is malformed.
[[nodiscard]] std::map<std::string, Shape> sharding_offsets(
    const std::map<std::string, std::string>& metadata);

}  // namespace tessera
