// Writes into one-dimensional tensors that neither autograd nor its version counters notice:
// tensors that a graph has saved keep their version when a unit is gathered again.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>

#include "fsdp/plan/unit_layout.h"
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

// Copies of a whole unit on a device, in as few kernels as there are: what all ranks have sent to
// where the parameters lie, and gradients to the slices that the ranks get. The number of kernels
// does not grow with the ranks or the parameters, but for parameters that are cut along another
// dimension than the first, which take one more.

// `all`: the shards of the ranks of `from`, one after the other. `gathered`: the array of `to`, of
// the same parameters; with room for whole chunks where they are rows.
void copy_out(const UnitLayout& from, const at::Tensor& all, const UnitLayout& to,
              const at::Tensor& gathered);

// copy_out for any layouts, whose room does not matter, a run at a time.
void copy_runs(const UnitLayout& from, const at::Tensor& all, const UnitLayout& to,
               const at::Tensor& gathered);

// The part of `rank` in `parts`, of what lies in the array of `whole`, into that rank's `shard`.
void copy_part(const UnitLayout& whole, const at::Tensor& gathered, const UnitLayout& parts,
               int rank, const at::Tensor& shard);

// [rank][element]: what each rank gets of `gradients` by `slices`, zeros where one is undefined or
// nothing lies, and behind it the rank's row of `trailer`, whose dtype all have. Gradients of other
// dtypes are cast.
[[nodiscard]] at::Tensor join_slices(const UnitLayout& slices,
                                     const std::vector<at::Tensor>& gradients,
                                     const at::Tensor& trailer);

}  // namespace tessera::detail
