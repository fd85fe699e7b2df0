#include "format/olmo/dtensor.h"

#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "base/endian.h"
#include "format/olmo/objects.h"
#include "tessera/io.h"

namespace tessera::olmo {
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
  tensor.pieces.push_back({whole(tensor.shape), std::move(storage)});
  return Value(std::move(tensor));
}

// What torch calls the groups of this rank along each dimension. It counts: the group of all is
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
