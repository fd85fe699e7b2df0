// The places of a unit's parameters in its two arrays: the gathered one and a rank's shard.
//
// The gathered array holds every parameter whole. A shard has the same length on every rank, so
// that one collective moves all of them; the part that no parameter fills is padding. `runs` says
// which elements of which parameter a rank holds where, and is all that copies need: gathering,
// cutting gradients and taking over a module's parameters know of no other rule. Pure integers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "layout/plan.h"
#include "tessera/layout.h"

namespace tessera {

// A run of parameter `param` in a rank's shard: `local` is an element of the shard.
struct ParamRun : Run {
  std::size_t param = 0;
};

// The first of `runs`, ascending in `local`, that ends behind element `begin` of the shard.
[[nodiscard]] std::vector<ParamRun>::const_iterator first_run(const std::vector<ParamRun>& runs,
                                                              std::int64_t begin) noexcept;

struct ParamPlace {
  Shape shape;
  std::int64_t elements = 0;
  std::int64_t gathered_offset = 0;
  int dim = 0;  // that shards are cut along
};

// Elements of a shard that belong to no parameter and are not zero.
inline constexpr double kPaddingValue = 42;

struct UnitLayout {
  std::vector<ParamPlace> params;
  // [rank], ascending in param and local, none empty.
  std::vector<std::vector<ParamRun>> runs;
  // [rank][parameter]: what the rank holds of the parameter, in its shard. Those of flat arrays are
  // flat ranges; one that a rank has nothing of stands at the parameter's end.
  std::vector<std::vector<Part>> parts;
  std::vector<std::vector<FlatRange>> padding;  // [rank], of the shard: holds kPaddingValue
  std::int64_t gathered_elements = 0;
  std::int64_t shard_elements = 0;
  // The shards of all ranks, one after the other, are the gathered array: nothing has to be copied
  // from one to the other.
  bool is_end_to_end = false;
};

// FSDP2: rank r holds slices [r*chunk, (r+1)*chunk) of one dimension of every parameter that exist,
// chunk = ceil(size/world) as torch.chunk cuts (fsdp-rows P2). The dimension is `dims[parameter]`,
// 0 where `dims` ends (fsdp-rows F4). Every parameter has room for a whole chunk in every shard;
// what a rank does not hold is padding. `alignment`: elements that every parameter of the gathered
// array starts at a multiple of. `whole_chunks`: every parameter has room for as many whole chunks
// there as there are ranks, so that one kernel copies what they sent (on a device). Throws
// `invalid_argument` for a shape without dimensions.
[[nodiscard]] UnitLayout rows_layout(const std::vector<Shape>& shapes, int world,
                                     std::int64_t alignment, const std::vector<int>& dims = {},
                                     bool whole_chunks = false);

// FSDP1: parameters lie end to end in one flat array, which is cut into `world` equal ranges, the
// last ones shorter or empty; what is missing at their end is zero. With `alignment`
// above 0 (use_orig_params) parameters start at multiples of it, and the array's length is a
// multiple of `world` (fsdp-rows UO4); what fills the gaps is 42 (fsdp-rows K8). Alignment in
// elements: 16 bytes (fsdp-rows K9).
[[nodiscard]] UnitLayout flat_layout(const std::vector<Shape>& shapes, int world,
                                     std::int64_t alignment);

// fully_shard with ShardLayout::flat: the same flat array, but each parameter and each rank's range
// starts at a multiple of `alignment`, and what fills the gaps is zero.
[[nodiscard]] UnitLayout aligned_layout(const std::vector<Shape>& shapes, int world,
                                        std::int64_t alignment);

// The same gathered array over `ranks` ranks, a divisor of those that `whole`, an aligned layout,
// is for.
[[nodiscard]] UnitLayout over_fewer_ranks(const UnitLayout& whole, int ranks);

// The layout of what every rank of a flat array holds of `params` (ascending), end to end: a slice
// is as long as the longest.
[[nodiscard]] UnitLayout packed(const UnitLayout& whole, const std::vector<std::size_t>& params);

// The parts that all ranks hold of a parameter, in an array of all shards, one after the other.
[[nodiscard]] std::vector<Part> parts_of(const UnitLayout& layout, std::size_t param);

}  // namespace tessera
