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
// Of all as one vector. Collective.
[[nodiscard]] double total_norm(const NormParts& parts, double norm_type);

}  // namespace tessera::detail
