#include "format/olmo/sharded_tensor.h"

#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "base/numbers.h"
#include "tessera/io.h"

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

namespace {

constexpr const char* kTensor = "torch.distributed.tensor";
constexpr const char* kMesh = "torch.distributed.device_mesh";
constexpr const char* kMeshLayout = "torch.distributed._mesh_layout";

Value of_tensor(const char* module, const char* name) {
  return Value::global(std::string(kTensor) + module, name);
}

// A named tuple.
Value record(Value cls, Value::List fields) {
  return Value::object(
      {.callable = std::move(cls), .arguments = Value::tuple(std::move(fields)), .by_new = true});
}

// The ranks of the mesh, as an array of 32-bit integers.
Value rank_map(int ranks) {
  std::vector<std::byte> bytes(static_cast<std::size_t>(ranks) * 4);
  for (int rank = 0; rank < ranks; ++rank)
    store_le(&bytes[static_cast<std::size_t>(rank) * 4], static_cast<std::int32_t>(rank));
  auto storage = std::make_shared<Storage>();
  storage->size = bytes.size();
  storage->dtype = DType::int32;
  storage->source = memory_source(std::move(bytes), "the ranks of a mesh");
  Tensor tensor;
  tensor.dtype = DType::int32;
  tensor.shape = {ranks};
  tensor.pieces.push_back(
      {.slice = whole(tensor.shape), .storage = std::move(storage), .strides = {}});
  return Value(std::move(tensor));
}

// Torch's names of the groups of this rank along each dimension. It counts: the group of all is
// "0", and serves as the dimension that all ranks are in.
Value group_names(int rank, const HybridMesh& mesh) {
  const int copy = rank / mesh.parts;
  if (mesh.parts == 1) return Value::list({"0", std::to_string(1 + copy)});
  return Value::list(
      {std::to_string(1 + rank % mesh.parts), std::to_string(1 + mesh.parts + copy)});
}

}  // namespace

DTensorMaker::DTensorMaker(int rank, const HybridMesh& mesh)
    : layout_(call(Value::global("torch.serialization", "_get_layout"), {Value("torch.strided")})),
      mesh_(mesh_of(rank, mesh)) {}

Value DTensorMaker::mesh_of(int rank, const HybridMesh& mesh) const {
  const Value axis_class = Value::global(kMeshLayout, "_FlatLayout");
  const auto axis = [&](int size, int step) {
    // Torch drops dimensions of one rank here.
    const Shape sizes = size == 1 ? Shape() : Shape{size};
    const Shape steps = size == 1 ? Shape() : Shape{step};
    return instance(axis_class,
                    Value::dict({{shape_, tuple_of(sizes)}, {stride_, tuple_of(steps)}}));
  };
  Value axes = Value::tuple({axis(mesh.copies, mesh.parts), axis(mesh.parts, 1)});
  const int ranks = mesh.copies * mesh.parts;
  Value::List all;
  for (int r = 0; r < ranks; ++r) all.emplace_back(r);
  return instance(
      Value::global(kMesh, "DeviceMesh"),
      Value::dict({{"_device_type", mesh.device},
                   {"_layout", instance(Value::global(kMeshLayout, "_MeshLayout"),
                                        Value::dict({{"axes", std::move(axes)}}))},
                   {"_rank_map", rank_map(ranks)},
                   {"_mesh_dim_names", {}},
                   {"_root_mesh", {}},
                   {"_flatten_rank_map", Value::tuple(std::move(all))},
                   {"_thread_id", {}},
                   {"_flatten_mapping", Value::dict()},
                   {"_dim_group_names", group_names(rank, mesh)},
                   {"_rank", rank},
                   {"_coordinate_on_dim", Value::tuple({rank / mesh.parts, rank % mesh.parts})},
                   {hash_, {}}}));
}

// Copies over the first dimension of the mesh, rows over the second.
Value DTensorMaker::placements() const {
  return Value::tuple({instance(of_tensor(".placement_types", "Replicate"), Value::dict()),
                       instance(of_tensor(".placement_types", "Shard"), Value::dict({{dim_, 0}}))});
}

Value DTensorMaker::spec(DType dtype, const Shape& shape) const {
  Value meta =
      record(of_tensor("._dtensor_spec", "TensorMeta"),
             {size_object(shape), tuple_of(contiguous_strides(shape)), dtype_global(dtype)});
  Value order = record(of_tensor("._dtensor_spec", "ShardOrderEntry"), {0, Value::tuple({1})});
  return instance(of_tensor("._dtensor_spec", "DTensorSpec"),
                  Value::dict({{mesh_name_, mesh_},
                               {placements_, placements()},
                               {tensor_meta_, std::move(meta)},
                               {shard_order_, Value::tuple({std::move(order)})},
                               {strided_, false},
                               {hash_, {}}}));
}

Value DTensorMaker::make(DType dtype, const Shape& shape, const Value& local) const {
  const Value cls = of_tensor("", "DTensor");
  Value device = call(Value::global("torch", "device"), {Value("cpu")});
  Value arguments =
      Value::tuple({cls, dtype_global(dtype), tuple_of(shape), tuple_of(contiguous_strides(shape)),
                    0, layout_, std::move(device), false});
  Value state =
      Value::tuple({{}, Value::dict({{local_tensor_, local}, {spec_, spec(dtype, shape)}})});
  return call(Value::global("torch._tensor", "_rebuild_from_type_v2"),
              {Value::global("torch._utils", "_rebuild_wrapper_subclass"), cls,
               std::move(arguments), std::move(state)});
}

}  // namespace tessera::olmo
