// For tests whose ranks may compute on devices.
#pragma once

#include <torch/torch.h>

#include <vector>

#include "torch/device.h"

namespace tessera::testing {

// Values, wherever they are.
inline bool equal(const torch::Tensor& found, const torch::Tensor& expected) {
  return torch::equal(found.cpu(), expected.cpu());
}
inline bool allclose(const torch::Tensor& found, const torch::Tensor& expected,
                     double relative = 1e-5, double absolute = 1e-8) {
  return torch::allclose(found.cpu(), expected.cpu(), relative, absolute);
}

// As module->to() does: what no unit holds is the user's to move.
inline void move_to(const torch::Device& device, const std::vector<torch::Tensor>& tensors) {
  for (const auto& tensor : tensors) replace_data(tensor, tensor.detach().to(device));
}
inline void move_to(const torch::Device& device, const torch::nn::Module& module) {
  move_to(device, module.parameters());
  move_to(device, module.buffers());
}

}  // namespace tessera::testing
