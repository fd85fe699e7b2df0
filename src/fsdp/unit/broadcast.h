// Rank 0's values to all ranks.
#pragma once

#include <torch/types.h>

#include <cstddef>
#include <vector>

#include "tessera/mesh.h"

namespace tessera::detail {

constexpr std::size_t kBroadcastBytes = 250 << 20;  // fsdp-rows K4
// Rank 0's values to all ranks, in messages of about `message_bytes`; what is listed twice goes
// once. Throws `invalid_argument` for a tensor without data. Collective.
void broadcast_from_first(std::vector<at::Tensor> tensors, const Mesh& mesh,
                          std::size_t message_bytes = kBroadcastBytes);

}  // namespace tessera::detail
