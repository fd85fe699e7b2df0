#include "format/olmo/sharded_tensor.h"

#include "format/olmo/objects.h"

namespace tessera::olmo {
namespace {

constexpr const char* kShardedTensor = "torch.distributed._shard.sharded_tensor";

Value sharded_tensor_class() {
  return Value::global(std::string(kShardedTensor) + ".api", "ShardedTensor");
}

}  // namespace

ShardedTensorMaker::ShardedTensorMaker(int rank, int world)
    : rank_(rank),
      world_(world),
      group_class_(call(Value::global("builtins", "getattr"),
                        {sharded_tensor_class(), Value("ProcessGroupState")})),
      layout_(call(Value::global("torch.serialization", "_get_layout"), {Value("torch.strided")})),
      memory_format_(call(
          Value::global(std::string(kShardedTensor) + ".metadata", "MEM_FORMAT_ENCODING"), {0})) {}

Value ShardedTensorMaker::device() {
  return call(Value::global("torch", "device"), {Value("cpu")});
}

Value ShardedTensorMaker::placement(int rank) const {
  return instance(
      Value::global("torch.distributed.remote_device", "_remote_device"),
      Value::dict({{worker_name_, {}}, {remote_rank_, rank}, {remote_device_, device()}}));
}

Value ShardedTensorMaker::shard_metadata(const Box& box, Value placement) const {
  // A class with __slots__: the state is (nothing, the slots).
  return instance(Value::global("torch.distributed._shard.metadata", "ShardMetadata"),
                  Value::tuple({{},
                                Value::dict({{shard_offsets_, list_of(box.offsets)},
                                             {shard_sizes_, list_of(box.sizes)},
                                             {placement_, std::move(placement)}})}));
}

Value ShardedTensorMaker::local_shards(const std::vector<Box>& chunks, const Value* local) const {
  if (local == nullptr) return Value::list();
  const Box& box = chunks.at(static_cast<std::size_t>(rank_));
  Value state =
      Value::dict({{tensor_, *local}, {metadata_, shard_metadata(box, placement(rank_))}});
  return Value::list({instance(Value::global(std::string(kShardedTensor) + ".shard", "Shard"),
                               Value::tuple({{}, std::move(state)}))});
}

Value ShardedTensorMaker::metadata(DType dtype, const Shape& shape, Value shards) const {
  const std::string module = std::string(kShardedTensor) + ".metadata";
  Value properties =
      instance(Value::global(module, "TensorProperties"),
               Value::tuple({dtype_global(dtype), layout_, false, memory_format_, false}));
  return instance(Value::global(module, "ShardedTensorMetadata"),
                  Value::dict({{shards_metadata_, std::move(shards)},
                               {size_, size_object(shape)},
                               {properties_, std::move(properties)}}));
}

Value ShardedTensorMaker::group_state() const {
  return instance(group_class_, Value::dict({{local_rank_, rank_},
                                             {global_rank_, rank_},
                                             {local_world_, world_},
                                             {global_world_, world_}}));
}

Value ShardedTensorMaker::make(DType dtype, const Shape& shape, const std::vector<Box>& chunks,
                               const Value* local) const {
  Value shards = Value::list();
  Value places = Value::list();
  int rank = 0;
  for (const Box& box : chunks) {
    const Value place = placement(rank++);
    shards.items().push_back(shard_metadata(box, place));
    places.items().push_back(place);
  }
  const Value cls = sharded_tensor_class();
  Value arguments =
      Value::tuple({cls, dtype_global(dtype), tuple_of(shape), tuple_of(contiguous_strides(shape)),
                    0, layout_, device(), false});
  Value spec = instance(Value::global("torch.distributed._shard.sharding_spec.chunk_sharding_spec",
                                      "ChunkShardingSpec"),
                        Value::dict({{dim_, 0}, {placements_, std::move(places)}}));
  Value state = Value::tuple({local_shards(chunks, local), metadata(dtype, shape, shards),
                              group_state(), std::move(spec), false});
  return call(Value::global("torch._tensor", "_rebuild_from_type_v2"),
              {Value::global("torch._utils", "_rebuild_wrapper_subclass"), cls,
               std::move(arguments), std::move(state)});
}

}  // namespace tessera::olmo
