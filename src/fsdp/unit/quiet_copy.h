// Writes into one-dimensional tensors that neither autograd nor its version counters notice:
// tensors that a graph has saved keep their version when a unit is gathered again.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <cstring>

#include "torch/tensor.h"

namespace tessera::detail {

// Casts where the dtypes differ, and takes conjugates and negatives for what they are.
inline void copy_quietly(const at::Tensor& to, std::int64_t to_offset, const at::Tensor& from,
                         std::int64_t from_offset, std::int64_t count) {
  if (count == 0) return;
  const bool same_bytes = to.scalar_type() == from.scalar_type() && is_plain(to) && is_plain(from);
  if (to.is_cpu() && same_bytes) {
    const auto size = to.element_size();
    std::memcpy(static_cast<char*>(to.mutable_data_ptr()) + to_offset * size,
                static_cast<const char*>(from.const_data_ptr()) + from_offset * size, count * size);
    return;
  }
  at::AutoDispatchBelowADInplaceOrView quiet;
  to.narrow(0, to_offset, count).copy_(from.narrow(0, from_offset, count));
}

inline void zero_quietly(const at::Tensor& to, std::int64_t offset, std::int64_t count) {
  if (count == 0) return;
  if (to.is_cpu()) {
    const auto size = to.element_size();
    std::memset(static_cast<char*>(to.mutable_data_ptr()) + offset * size, 0, count * size);
    return;
  }
  at::AutoDispatchBelowADInplaceOrView quiet;
  to.narrow(0, offset, count).zero_();
}

}  // namespace tessera::detail
