// A tensor's elements as bytes in the host's memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <span>

#include "torch/tensor.h"

namespace tessera {

// What the tensor is, contiguous on the host; the tensor itself where it is that already.
[[nodiscard]] inline at::Tensor to_host(const at::Tensor& tensor) {
  return plain(tensor.detach()).cpu().contiguous();
}

// Of what to_host gave, which has to live as long.
[[nodiscard]] inline std::span<const std::byte> host_bytes(const at::Tensor& host) {
  return {static_cast<const std::byte*>(host.const_data_ptr()), host.nbytes()};
}

}  // namespace tessera
