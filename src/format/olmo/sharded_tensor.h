// The ShardedTensors and DTensors of a `rank*.pt` (checkpoint-rows F-04, O-60), as torch pickles
// them.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "tessera/layout.h"
#include "tessera/value.h"

namespace tessera::olmo {

// Python objects as values, for the writers of this folder.

inline Value call(Value callable, Value::List arguments) {
  return Value::object(
      {.callable = std::move(callable), .arguments = Value::tuple(std::move(arguments))});
}

// cls.__new__(cls), then this state.
inline Value instance(Value cls, Value state) {
  return Value::object({.callable = std::move(cls),
                        .arguments = Value::tuple(),
                        .by_new = true,
                        .state = std::move(state)});
}

inline Value list_of(const Shape& shape) {
  return Value::list({shape.begin(), shape.end()});
}

inline Value tuple_of(const Shape& shape) {
  return Value::tuple({shape.begin(), shape.end()});
}

inline Value size_object(const Shape& shape) {
  return call(Value::global("torch", "Size"), {tuple_of(shape)});
}

inline Value dtype_global(DType dtype) {
  return Value::global("torch", std::string(info(dtype).torch));
}

// The ShardedTensors of a `rank*.pt` (checkpoint-rows F-04), as torch pickles them.

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

// The DTensors of a `rank*.pt` that a hybrid mesh saved (checkpoint-rows F-04, O-60), as torch
// pickles them.

// A mesh of two dimensions: rank r is number r / parts of those that hold part r % parts.
struct HybridMesh {
  int copies = 1;
  int parts = 1;
  std::string device = "cpu";  // torch's name of its type
};

// Makes the DTensors of one file. They share one mesh, as in torch.
//
// Torch puts two things into a mesh that depend on the process. A cached hash is left out: torch
// computes it when it is asked for. Names of process groups are those that torch counts out to a
// program whose first mesh this is, as OLMo's is: torch looks its groups up by them.
class DTensorMaker {
 public:
  DTensorMaker(int rank, const HybridMesh& mesh);

  // A tensor of `shape` whose rows the parts share as torch.chunk does. `local`: the tensor leaf
  // with this rank's rows, of which there may be none.
  [[nodiscard]] Value make(DType dtype, const Shape& shape, const Value& local) const;

 private:
  [[nodiscard]] Value mesh_of(int rank, const HybridMesh& mesh) const;
  [[nodiscard]] Value placements() const;
  [[nodiscard]] Value spec(DType dtype, const Shape& shape) const;

  // Objects and attribute names that are single in Python.
  Value hash_ = "_hash", dim_ = "dim", shape_ = "shape", stride_ = "stride";
  Value local_tensor_ = "_local_tensor", spec_ = "_spec", mesh_name_ = "mesh";
  Value placements_ = "placements", tensor_meta_ = "tensor_meta", shard_order_ = "shard_order";
  Value strided_ = "use_strided_shard_as_shard_order";
  Value layout_, mesh_;
};

}  // namespace tessera::olmo
