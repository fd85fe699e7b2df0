// Copies of a whole unit on a device, in as few kernels as there are: what all ranks have sent to
// where the parameters lie, and gradients to the slices that the ranks get. The number of kernels
// does not grow with the ranks or the parameters, but for parameters that are cut along another
// dimension than the first, which take one more.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "fsdp/plan/unit_layout.h"

namespace tessera::detail {

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
