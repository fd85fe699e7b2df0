// Where the parameters of a unit lie in its two arrays: the gathered one and a rank's shard.
//
// The gathered array holds every parameter whole. A shard has the same length on every rank, so
// that one collective moves all of them; what of it no parameter fills is padding. `runs` says
// which elements of which parameter a rank holds where, and is all that copies need: gathering,
// cutting gradients and taking over a module's parameters know of no other rule. Pure integers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tessera/layout.h"

namespace tessera {

// Elements [param_offset, +count) of parameter `param`, at shard_offset of a rank's shard.
struct ShardRun {
  std::size_t param = 0;
  std::int64_t param_offset = 0;
  std::int64_t shard_offset = 0;
  std::int64_t count = 0;
};

// The first of `runs`, ascending in shard_offset, that ends behind element `begin` of the shard.
[[nodiscard]] std::vector<ShardRun>::const_iterator first_run(const std::vector<ShardRun>& runs,
                                                              std::int64_t begin) noexcept;

struct ParamPlace {
  Shape shape;
  std::int64_t elements = 0;
  std::int64_t gathered_offset = 0;
  int dim = 0;  // that shards are cut along
};

// What a rank holds of one parameter, as a tensor of its shard.
struct LocalPlace {
  Shape shape;
  std::int64_t shard_offset = 0;
};

// Elements of a rank's shard that belong to no parameter and are not zero.
struct Padding {
  std::int64_t shard_offset = 0;
  std::int64_t count = 0;
};
inline constexpr double kPaddingValue = 42;

struct UnitLayout {
  std::vector<ParamPlace> params;
  std::vector<std::vector<ShardRun>>
      runs;  // [rank], ascending in param and shard_offset, none empty
  std::vector<std::vector<LocalPlace>> local;  // [rank][parameter]
  std::vector<std::vector<Padding>> padding;   // [rank]; empty: only zeros
  std::int64_t gathered_elements = 0;
  std::int64_t shard_elements = 0;
};

// FSDP2: rank r holds slices [r*chunk, (r+1)*chunk) of one dimension of every parameter that exist,
// chunk = ceil(size/world) as torch.chunk cuts (spec P2). The dimension is `dims[parameter]`, 0
// where `dims` ends (F4). Every parameter has room for a whole
// chunk in every shard; what a rank does not hold is padding. `alignment`: elements that every
// parameter of the gathered array starts at a multiple of. Throws `invalid_argument` for a shape
// without dimensions.
[[nodiscard]] UnitLayout rows_layout(const std::vector<Shape>& shapes, int world,
                                     std::int64_t alignment, const std::vector<int>& dims = {});

// FSDP1: parameters lie end to end in one flat array, which is cut into `world` equal ranges, the
// last ones shorter or empty (spec T2); what is missing at their end is zero. With `alignment`
// above 0 (use_orig_params) parameters start at multiples of it, and the array's length is a
// multiple of `world` (UO4); what fills the gaps is 42 (K8). Alignment in elements: 16 bytes (K9).
[[nodiscard]] UnitLayout flat_layout(const std::vector<Shape>& shapes, int world,
                                     std::int64_t alignment);

}  // namespace tessera
