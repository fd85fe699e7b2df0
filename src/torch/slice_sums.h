// The arithmetic of Channel::start_reduce, for transports that add up themselves.
#pragma once

#include <torch/types.h>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "comm/same_host/reduce.h"
#include "torch/tensor.h"
#include "torch/transport.h"

namespace tessera {

// What same_host::reduce calls `type`, when slices of it can be added up.
inline std::optional<DType> summable(at::ScalarType type) {
  if (type != at::kFloat && type != at::kDouble && type != at::kHalf && type != at::kBFloat16)
    return std::nullopt;
  return dtype_of(type);
}

// Dividing right after adding gives the bits of dividing what was rounded to the type.
inline bool divides_at_once(at::ScalarType type) {
  return type == at::kFloat || type == at::kDouble;
}

// Elements [begin, begin + part.numel()) of a sum: adds up `sources`, one a rank, in their order,
// into `part`, which may be one of them, and divides what of it is to be averaged, if that can be
// done at once.
inline void add_up(const SliceSum& sum, std::int64_t begin, std::vector<const std::byte*> sources,
                   const at::Tensor& part) {
  const auto dtype = *summable(sum.dtype);
  const auto count = part.numel();
  const auto averaged = divides_at_once(sum.dtype)
                            ? std::clamp<std::int64_t>(sum.averaged - begin, 0, count)
                            : std::int64_t{0};
  auto* out = static_cast<std::byte*>(part.mutable_data_ptr());
  same_host::reduce(dtype, same_host::Reduction::average, sources, out, averaged);
  const auto bytes = static_cast<std::size_t>(averaged) * c10::elementSize(sum.dtype);
  for (auto& source : sources) source += bytes;
  same_host::reduce(dtype, same_host::Reduction::sum, sources, out + bytes, count - averaged);
}

// The rest of the division, when all of `values` is there.
inline void divide_rest(const SliceSum& sum, int ranks, const at::Tensor& values) {
  if (sum.averaged > 0 && !divides_at_once(sum.dtype))
    values.narrow(0, 0, sum.averaged).div_(ranks);
}

}  // namespace tessera
