// The ShardedTensors of a `rank*.pt` (checkpoint-rows F-04), as torch pickles them.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/layout.h"
#include "tessera/value.h"

namespace tessera::olmo {

// Makes the ShardedTensors of one file: what the objects of one Python process share is shared
// here too, so that the pickle is the one that torch writes.
class ShardedTensorMaker {
 public:
  // `rank` of `world` ranks, all in one process group.
  ShardedTensorMaker(int rank, int world);

  // A tensor of `shape` whose rows lie as `chunks` say: chunk i belongs to rank i, and there may be
  // fewer chunks than ranks. `local`: the tensor leaf with this rank's chunk; null when it has
  // none.
  [[nodiscard]] Value make(DType dtype, const Shape& shape, const std::vector<Box>& chunks,
                           const Value* local) const;

 private:
  [[nodiscard]] static Value device();
  [[nodiscard]] Value placement(int rank) const;
  [[nodiscard]] Value shard_metadata(const Box& box, Value placement) const;
  [[nodiscard]] Value local_shards(const std::vector<Box>& chunks, const Value* local) const;
  [[nodiscard]] Value metadata(DType dtype, const Shape& shape, Value shards) const;
  [[nodiscard]] Value group_state() const;

  int rank_;
  int world_;
  // Objects and attribute names that are single in Python.
  Value group_class_, layout_, memory_format_;
  Value worker_name_ = "_worker_name", remote_rank_ = "_rank", remote_device_ = "_device";
  Value shard_offsets_ = "shard_offsets", shard_sizes_ = "shard_sizes", placement_ = "placement";
  Value tensor_ = "tensor", metadata_ = "metadata";
  Value shards_metadata_ = "shards_metadata", size_ = "size", properties_ = "tensor_properties";
  Value local_rank_ = "local_rank", global_rank_ = "global_rank";
  Value local_world_ = "local_world_size", global_world_ = "global_world_size";
  Value dim_ = "dim", placements_ = "placements";
};

}  // namespace tessera::olmo
