// DTensor (checkpoint-rows F-04): the local tensor, and a spec that says which part of the whole it
// is: a mesh of ranks and, for each of its dimensions, how the tensor is laid over it.
#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <optional>
#include <span>

#include "base/numbers.h"
#include "base/text.h"
#include "format/sharded/attributes.h"
#include "layout/boxes.h"
#include "layout/strided.h"
#include "tessera/error.h"
#include "value/render.h"

namespace tessera::sharded {
namespace {

using Kind = Value::Kind;

constexpr std::string_view kPackage = "torch.distributed";
constexpr std::size_t kMaxMeshDims = 16;
constexpr std::int64_t kMaxRanks = 1 << 20;

// A mesh as one of its ranks sees it.
struct Mesh {
  Shape sizes;
  Shape coordinate;
};

void require_rank_count(std::int64_t count) {
  if (count > kMaxRanks) throw Error(ErrorCode::limit, "a mesh of more than 2^20 ranks");
}

const Tensor& integers_of(const Value& value) {
  const bool integers =
      value.is(Kind::tensor) && is_one_of(value.as_tensor().dtype, DType::int32, DType::int64);
  if (!integers) corrupt("the mesh is " + render(value, 60) + ", expected a tensor of ranks");
  return value.as_tensor();
}

void append_integers(ByteView bytes, std::size_t size, std::vector<std::int64_t>& to) {
  for (std::size_t i = 0; i < bytes.size(); i += size) {
    to.push_back(size == 4 ? load_le<std::int32_t>(&bytes[i]) : load_le<std::int64_t>(&bytes[i]));
  }
}

// The elements of a small tensor of integers.
std::vector<std::int64_t> read_integers(const Value& value) {
  const Tensor& tensor = integers_of(value);
  const std::int64_t count = numel(tensor.shape);
  require_rank_count(count);
  const std::size_t size = size_of(tensor.dtype);
  const Piece& piece = tensor.pieces.at(0);
  const Shape strides = piece.strides.empty() ? contiguous_strides(tensor.shape) : piece.strides;
  std::vector<std::int64_t> ranks;
  for_each_strided_run(
      tensor.shape, strides, 0, count, [&](std::int64_t position, std::int64_t run) {
        std::vector<std::byte> bytes(static_cast<std::size_t>(run) * size);
        const auto at = static_cast<std::uint64_t>(piece.storage_offset + position) * size;
        piece.storage->source->read_at(piece.storage->offset + at, bytes);
        append_integers(bytes, size, ranks);
      });
  return ranks;
}

void append_sizes(const Value& value, Shape& sizes) {
  if (value.is(Kind::integer)) {
    sizes.push_back(integer(value, "a mesh's size"));
  } else {
    for (const Value& item : sequence(value, "a mesh's sizes")) append_sizes(item, sizes);
  }
}

// The sizes that torch 2.9 and later give a mesh: a layout, whose dimensions have shapes.
Shape layout_sizes(const Value& layout) {
  Shape sizes;
  const Value* axes = optional_attribute(layout, "axes");
  if (axes == nullptr) {
    append_sizes(attribute(layout, "shape"), sizes);
    return sizes;
  }
  for (const Value& axis : sequence(*axes, "axes")) {
    Shape parts;
    append_sizes(attribute(attributes(axis, "_FlatLayout"), "shape"), parts);
    sizes.push_back(
        std::accumulate(parts.begin(), parts.end(), std::int64_t{1}, checked_mul<std::int64_t>));
  }
  return sizes;
}

Shape coordinate_of(std::int64_t rank, const std::vector<std::int64_t>& ranks, const Shape& sizes) {
  const auto found = std::find(ranks.begin(), ranks.end(), rank);
  if (found == ranks.end()) corrupt("the mesh does not say where the rank is");
  Shape coordinate;
  std::int64_t at = found - ranks.begin();
  for (const std::int64_t stride : contiguous_strides(sizes)) {
    coordinate.push_back(at / stride);
    at %= stride;
  }
  return coordinate;
}

void require_coordinate(const Mesh& mesh) {
  const bool inside =
      std::ranges::equal(mesh.coordinate, mesh.sizes,
                         [](std::int64_t at, std::int64_t size) { return at >= 0 && at < size; });
  if (!inside) {
    corrupt("coordinate " + to_string(mesh.coordinate) + " is outside of a mesh of " +
            to_string(mesh.sizes));
  }
}

void require_sizes(const Shape& sizes, const Rank& rank) {
  if (sizes.empty() || sizes.size() > kMaxMeshDims) corrupt("a mesh without dimensions");
  const std::int64_t count = numel(sizes);
  require_rank_count(count);
  if (count > rank.world) require_world(count, rank);
}

// A mesh's tensor of ranks; null: it has none.
const Value* ranks_of(const Value& state) {
  const Value* tensor = optional_attribute(state, "mesh");
  return tensor != nullptr ? tensor : optional_attribute(state, "_mesh");
}

Shape read_coordinate(const Value& value) {
  Shape coordinate;
  for (const Value& item : sequence(value, "_coordinate_on_dim")) {
    coordinate.push_back(integer(item, "a coordinate"));
  }
  return coordinate;
}

// Up to torch 2.8 a mesh has its tensor of ranks; later a layout, over a list of ranks.
Mesh read_mesh(const Value& value, const Rank& rank) {
  const Value& state = attributes(value, "DeviceMesh");
  Mesh mesh;
  std::vector<std::int64_t> ranks;
  if (const Value* tensor = ranks_of(state)) {
    ranks = read_integers(*tensor);
    mesh.sizes = tensor->as_tensor().shape;
  } else {
    mesh.sizes = layout_sizes(attributes(attribute(state, "_layout"), "_MeshLayout"));
  }
  require_sizes(mesh.sizes, rank);
  const Value* place = optional_attribute(state, "_coordinate_on_dim");
  mesh.coordinate =
      place != nullptr ? read_coordinate(*place) : coordinate_of(rank.rank, ranks, mesh.sizes);
  if (const Value* own = optional_attribute(state, "_rank")) {
    require_rank(integer(*own, "_rank"), rank);
  }
  require_coordinate(mesh);
  return mesh;
}

// Mesh dimension `mesh_dim` splits tensor dimension `dim`.
struct Split {
  std::size_t mesh_dim = 0;
  std::size_t dim = 0;
  bool strided = false;
};

// The dimension that a placement shards, of `dims`.
std::size_t sharded_dim(const Value& placement, std::size_t dims) {
  const Value& state = attributes(placement, "Shard");
  const std::int64_t dim = integer(attribute(state, "dim"), "a placement's dim");
  if (dim < 0 || dim >= static_cast<std::int64_t>(dims)) {
    corrupt("a placement shards dimension " + std::to_string(dim) + " of " + std::to_string(dims));
  }
  return static_cast<std::size_t>(dim);
}

// Mesh dimension `mesh_dim` of a tensor of `dims` dimensions; nullopt: it replicates.
std::optional<Split> read_placement(const Value& placement, std::size_t mesh_dim,
                                    std::size_t dims) {
  if (is_instance(placement, kPackage, "Replicate")) return std::nullopt;
  const bool strided = is_instance(placement, kPackage, "_StridedShard");
  if (!strided && !is_instance(placement, kPackage, "Shard")) {
    throw Error(ErrorCode::unsupported,
                "a DTensor is placed as " + render(placement, 80) + ", which holds no part of it");
  }
  return Split{mesh_dim, sharded_dim(placement, dims), strided};
}

// Into how many parts the mesh dimensions behind the first of `from` split its tensor dimension.
std::int64_t parts_behind(std::span<const Split> from, const Mesh& mesh) {
  std::int64_t parts = 1;
  for (const Split& split : from.subspan(1)) {
    if (split.dim == from[0].dim) parts *= mesh.sizes[split.mesh_dim];
  }
  return parts;
}

// A strided shard says that mesh dimensions behind it have split the tensor already.
void require_split_factor(const Value& placement, std::span<const Split> from, const Mesh& mesh) {
  const Value& state = attributes(placement, "_StridedShard");
  const std::int64_t factor = integer(attribute(state, "split_factor"), "split_factor");
  if (factor != parts_behind(from, mesh)) {
    throw Error(ErrorCode::unsupported,
                "a _StridedShard whose split factor is not the number of "
                "parts that the mesh makes before it");
  }
}

std::vector<Split> splits_of(const Value::List& placements, std::size_t dims) {
  std::vector<Split> splits;
  for (std::size_t i = 0; i < placements.size(); ++i) {
    if (const auto split = read_placement(placements[i], i, dims)) splits.push_back(*split);
  }
  return splits;
}

std::vector<Split> read_placements(const Value& value, const Mesh& mesh, std::size_t dims) {
  const Value::List& placements = sequence(value, "placements");
  if (placements.size() != mesh.sizes.size()) corrupt("a mesh has more dimensions than placements");
  std::vector<Split> splits = splits_of(placements, dims);
  for (std::size_t i = 0; i < splits.size(); ++i) {
    if (splits[i].strided)
      require_split_factor(placements[splits[i].mesh_dim], std::span(splits).subspan(i), mesh);
  }
  const auto strided = std::stable_partition(splits.begin(), splits.end(),
                                             [](const Split& split) { return !split.strided; });
  std::reverse(strided, splits.end());
  return splits;
}

// The mesh dimensions that split one of the tensor's, in their order.
const Value::List& mesh_dims_of(const Value& entry) {
  const bool known = entry.is(Kind::object) && entry.as_object().arguments.size() == 2;
  if (!known) corrupt("an entry of shard_order is " + render(entry, 60));
  return sequence(entry.as_object().arguments.items()[1], "mesh_dims");
}

const Split& split_of(const Value& mesh_dim, const std::vector<Split>& splits) {
  const auto found = std::ranges::find_if(splits, [&](const Split& split) {
    return Value(static_cast<std::int64_t>(split.mesh_dim)) == mesh_dim;
  });
  if (found == splits.end()) corrupt("shard_order names a mesh dimension that shards nothing");
  return *found;
}

std::vector<Split> sorted_by(const Value& order, const std::vector<Split>& splits) {
  std::vector<Split> sorted;
  for (const Value& entry : sequence(order, "shard_order")) {
    for (const Value& mesh_dim : mesh_dims_of(entry)) sorted.push_back(split_of(mesh_dim, splits));
  }
  if (sorted.size() != splits.size()) corrupt("shard_order does not name every shard");
  return sorted;
}

// The order in which the mesh's dimensions split a tensor's holds where a newer torch states it.
void apply_order(const Value& spec, std::vector<Split>& splits) {
  const Value* order = optional_attribute(spec, "shard_order");
  const bool strided = std::ranges::any_of(splits, &Split::strided);
  if (order != nullptr && !strided) splits = sorted_by(*order, splits);
}

Box box_of(const Shape& shape, const std::vector<Split>& splits, const Mesh& mesh) {
  Box box = whole(shape);
  for (const Split& split : splits) {
    box = chunk_of(std::move(box), split.dim, mesh.sizes[split.mesh_dim],
                   mesh.coordinate[split.mesh_dim]);
  }
  return box;
}

// The attributes in a DTensor's state: all of it, or the second of two when the class has slots.
const Value& attributes_of(const Value& state) {
  const bool slots = state.is(Kind::tuple) && state.size() == 2;
  return slots ? state.items()[1] : state;
}

const Value& spec_of(const Value& dtensor) {
  const Value& state = attributes_of(dtensor.as_object().arguments.items()[3]);
  return attributes(attribute(state, "_spec"), "DTensorSpec");
}

// (class, dtype, size, stride, storage offset, layout, device, requires_grad)
const Value::List& arguments_of(const Value& dtensor) {
  const Value& made = dtensor.as_object().arguments.items()[2];
  if (sequence(made, "a DTensor's arguments").size() < 8)
    corrupt("a DTensor with arguments missing");
  return made.items();
}

}  // namespace

bool is_dtensor(const Value& value) {
  return is_rebuilt_as(value, kPackage, "DTensor");
}

int ranks_of_dtensor(const Value& value) {
  const Value& state = attributes(attribute(spec_of(value), "mesh"), "DeviceMesh");
  const Value* all = optional_attribute(state, "_flatten_rank_map");
  const std::int64_t count =
      all != nullptr ? static_cast<std::int64_t>(sequence(*all, "_flatten_rank_map").size())
      : ranks_of(state) != nullptr
          ? numel(integers_of(*ranks_of(state)).shape)
          : numel(layout_sizes(attributes(attribute(state, "_layout"), "_MeshLayout")));
  require_rank_count(count);
  if (count < 1) corrupt("a mesh without ranks");
  return static_cast<int>(count);
}

Local local_of_dtensor(const Value& value) {
  const Value& state = attributes_of(value.as_object().arguments.items()[3]);
  return {shape(arguments_of(value)[2], "a DTensor's size"), {attribute(state, "_local_tensor")}};
}

Tensor read_dtensor(const Value& value, const Rank& rank) {
  const Value::List& made = arguments_of(value);
  const Value& state = attributes_of(value.as_object().arguments.items()[3]);
  const Value& spec = spec_of(value);
  Tensor tensor;
  tensor.dtype = dtype(made[1]);
  tensor.shape = shape(made[2], "a DTensor's size");
  tensor.requires_grad = made[7] == Value(true);
  tensor.sharded = true;
  const Mesh mesh = read_mesh(attribute(spec, "mesh"), rank);
  std::vector<Split> splits =
      read_placements(attribute(spec, "placements"), mesh, tensor.shape.size());
  apply_order(spec, splits);
  add_unless_empty(tensor, piece_of(attribute(state, "_local_tensor"), tensor,
                                    box_of(tensor.shape, splits, mesh), rank.rank));
  return tensor;
}

}  // namespace tessera::sharded
