// Norms over tensors of which ranks hold parts.
#pragma once

#include <optional>
#include <vector>

#include "tessera/norms.h"

namespace tessera::detail {

// Tensors of this rank by what they are a part of.
struct NormParts {
  std::vector<at::Tensor> tensors;  // by parameter; undefined: nothing of it is here
  std::vector<bool> sharded;        // by parameter
  std::optional<Mesh> mesh;         // of the shards; none: all are whole
};
// Throws `unsupported` for two meshes.
[[nodiscard]] NormParts norm_parts(const std::vector<ShardedParameter>& parameters, NormOf of);

// For the other ranks to read: "the norm of gradients".
[[nodiscard]] inline const char* purpose_of(NormOf of) {
  return of == NormOf::gradients ? "the norm of gradients" : "the norm of parameters";
}
// Throws `invalid_argument` unless it is above 0.
void require_norm_type(double norm_type);
// The norm of all as one vector: a float64 number on the mesh's device, without a mesh where the
// tensors are. The host does not wait for a device, unless tensors are on the CPU beside it.
// Collective.
[[nodiscard]] at::Tensor total_norm(const NormParts& parts, double norm_type);

}  // namespace tessera::detail
