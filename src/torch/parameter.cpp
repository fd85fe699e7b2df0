#include "tessera/parameter.h"

namespace tessera {

std::vector<torch::Tensor> local_tensors(const std::vector<ShardedParameter>& parameters) {
  std::vector<torch::Tensor> tensors;
  tensors.reserve(parameters.size());
  for (const auto& parameter : parameters) tensors.push_back(parameter.local);
  return tensors;
}

}  // namespace tessera
