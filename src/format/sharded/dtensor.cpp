// DTensor (F-04): the local tensor, and a spec that says which part of the whole it is: a mesh of
// ranks and, for each of its dimensions, how the tensor is laid over it.
#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <span>

#include "base/checked.h"
#include "base/endian.h"
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

// The elements of a small tensor of integers.
std::vector<std::int64_t> read_integers(const Value& value) {
  const bool integers = value.is(Kind::tensor) && (value.as_tensor().dtype == DType::int32 ||
                                                   value.as_tensor().dtype == DType::int64);
  if (!integers) corrupt("the mesh is " + render(value, 60) + ", expected a tensor of ranks");
  const Tensor& tensor = value.as_tensor();
  const std::int64_t count = numel(tensor.shape);
  if (count > kMaxRanks) throw Error(ErrorCode::limit, "a mesh of more than 2^20 ranks");
  const std::size_t size = size_of(tensor.dtype);
  const Piece& piece = tensor.pieces.at(0);
  const Shape strides = piece.strides.empty() ? contiguous_strides(tensor.shape) : piece.strides;
  std::vector<std::int64_t> ranks;
  for_each_strided_run(
      tensor.shape, strides, 0, count, [&](std::int64_t position, std::int64_t run) {
        std::vector<std::byte> bytes(static_cast<std::size_t>(run) * size);
        const auto at = static_cast<std::uint64_t>(piece.storage_offset + position) * size;
        piece.storage->source->read_at(piece.storage->offset + at, bytes);
        for (std::size_t i = 0; i < bytes.size(); i += size) {
          ranks.push_back(size == 4 ? load_le<std::int32_t>(&bytes[i])
                                    : load_le<std::int64_t>(&bytes[i]));
        }
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
    std::int64_t size = 1;
    for (const std::int64_t part : parts) size = checked_mul(size, part);
    sizes.push_back(size);
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
  bool inside = mesh.coordinate.size() == mesh.sizes.size();
  for (std::size_t d = 0; inside && d < mesh.sizes.size(); ++d) {
    inside = mesh.coordinate[d] >= 0 && mesh.coordinate[d] < mesh.sizes[d];
  }
  if (!inside) {
    corrupt("coordinate " + to_string(mesh.coordinate) + " is outside of a mesh of " +
            to_string(mesh.sizes));
  }
}

// Up to torch 2.8 a mesh has its tensor of ranks; later a layout, over a list of ranks.
Mesh read_mesh(const Value& value, const Rank& rank) {
  const Value& state = attributes(value, "DeviceMesh");
  Mesh mesh;
  std::vector<std::int64_t> ranks;
  const Value* tensor = optional_attribute(state, "mesh");
  if (tensor == nullptr) tensor = optional_attribute(state, "_mesh");
  if (tensor != nullptr) {
    ranks = read_integers(*tensor);
    mesh.sizes = tensor->as_tensor().shape;
  } else {
    mesh.sizes = layout_sizes(attributes(attribute(state, "_layout"), "_MeshLayout"));
  }
  if (mesh.sizes.empty() || mesh.sizes.size() > kMaxMeshDims) corrupt("a mesh without dimensions");
  const std::int64_t count = numel(mesh.sizes);
  if (count > kMaxRanks) throw Error(ErrorCode::limit, "a mesh of more than 2^20 ranks");
  if (count > rank.world) require_world(count, rank);
  if (const Value* place = optional_attribute(state, "_coordinate_on_dim")) {
    for (const Value& item : sequence(*place, "_coordinate_on_dim")) {
      mesh.coordinate.push_back(integer(item, "a coordinate"));
    }
  } else {
    mesh.coordinate = coordinate_of(rank.rank, ranks, mesh.sizes);
  }
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

// Mesh dimension `mesh_dim` of a tensor of `dims` dimensions; nullopt: it replicates.
std::optional<Split> read_placement(const Value& placement, std::size_t mesh_dim,
                                    std::size_t dims) {
  if (is_instance(placement, kPackage, "Replicate")) return std::nullopt;
  const bool strided = is_instance(placement, kPackage, "_StridedShard");
  if (!strided && !is_instance(placement, kPackage, "Shard")) {
    throw Error(ErrorCode::unsupported,
                "a DTensor is placed as " + render(placement, 80) + ", which holds no part of it");
  }
  const Value& state = attributes(placement, "Shard");
  const std::int64_t dim = integer(attribute(state, "dim"), "a placement's dim");
  if (dim < 0 || dim >= static_cast<std::int64_t>(dims)) {
    corrupt("a placement shards dimension " + std::to_string(dim) + " of " + std::to_string(dims));
  }
  return Split{mesh_dim, static_cast<std::size_t>(dim), strided};
}

// A strided shard says that mesh dimensions behind it have split the tensor already.
void require_split_factor(const Value& placement, std::span<const Split> from, const Mesh& mesh) {
  std::int64_t before = 1;
  for (const Split& split : from.subspan(1)) {
    if (split.dim == from[0].dim) before *= mesh.sizes[split.mesh_dim];
  }
  const Value& state = attributes(placement, "_StridedShard");
  if (integer(attribute(state, "split_factor"), "split_factor") != before) {
    throw Error(ErrorCode::unsupported,
                "a _StridedShard whose split factor is not the number of "
                "parts that the mesh makes before it");
  }
}

std::vector<Split> read_placements(const Value& value, const Mesh& mesh, std::size_t dims) {
  const Value::List& placements = sequence(value, "placements");
  if (placements.size() != mesh.sizes.size()) corrupt("a mesh has more dimensions than placements");
  std::vector<Split> splits;
  for (std::size_t i = 0; i < placements.size(); ++i) {
    if (const auto split = read_placement(placements[i], i, dims)) splits.push_back(*split);
  }
  for (std::size_t i = 0; i < splits.size(); ++i) {
    if (splits[i].strided)
      require_split_factor(placements[splits[i].mesh_dim], std::span(splits).subspan(i), mesh);
  }
  const auto strided = std::stable_partition(splits.begin(), splits.end(),
                                             [](const Split& split) { return !split.strided; });
  std::reverse(strided, splits.end());
  return splits;
}

// Where a newer torch says in which order the mesh's dimensions split a tensor's, that order holds.
void apply_order(const Value& spec, std::vector<Split>& splits) {
  const Value* order = optional_attribute(spec, "shard_order");
  const bool strided =
      std::any_of(splits.begin(), splits.end(), [](const Split& split) { return split.strided; });
  if (order == nullptr || strided) return;
  std::vector<Split> sorted;
  for (const Value& entry : sequence(*order, "shard_order")) {
    const bool known = entry.is(Kind::object) && entry.as_object().arguments.size() == 2;
    if (!known) corrupt("an entry of shard_order is " + render(entry, 60));
    for (const Value& mesh_dim : sequence(entry.as_object().arguments.items()[1], "mesh_dims")) {
      const auto found = std::find_if(splits.begin(), splits.end(), [&](const Split& split) {
        return Value(static_cast<std::int64_t>(split.mesh_dim)) == mesh_dim;
      });
      if (found == splits.end()) corrupt("shard_order names a mesh dimension that shards nothing");
      sorted.push_back(*found);
    }
  }
  if (sorted.size() != splits.size()) corrupt("shard_order does not name every shard");
  splits = std::move(sorted);
}

Box box_of(const Shape& shape, const std::vector<Split>& splits, const Mesh& mesh) {
  Box box = whole(shape);
  for (const Split& split : splits) {
    box = chunk_of(std::move(box), split.dim, mesh.sizes[split.mesh_dim],
                   mesh.coordinate[split.mesh_dim]);
  }
  return box;
}

}  // namespace

bool is_dtensor(const Value& value) {
  if (!value.is(Kind::object)) return false;
  const Object& object = value.as_object();
  return is_global(object.callable, "torch._tensor", "_rebuild_from_type_v2") &&
         object.arguments.size() == 4 &&
         is_global(object.arguments.items()[1], kPackage, "DTensor");
}

Tensor read_dtensor(const Value& value, const Rank& rank) {
  const Value::List& arguments = value.as_object().arguments.items();
  // (class, dtype, size, stride, storage offset, layout, device, requires_grad)
  const Value::List& made = sequence(arguments[2], "a DTensor's arguments");
  if (made.size() < 8) corrupt("a DTensor with arguments missing");
  const Value& pair = arguments[3];
  const bool slots = pair.is(Kind::tuple) && pair.size() == 2;
  const Value& state = slots ? pair.items()[1] : pair;
  const Value& spec = attributes(attribute(state, "_spec"), "DTensorSpec");
  Tensor tensor;
  tensor.dtype = dtype(made[1]);
  tensor.shape = shape(made[2], "a DTensor's size");
  tensor.requires_grad = made[7] == Value(true);
  tensor.sharded = true;
  const Mesh mesh = read_mesh(attribute(spec, "mesh"), rank);
  std::vector<Split> splits =
      read_placements(attribute(spec, "placements"), mesh, tensor.shape.size());
  apply_order(spec, splits);
  Piece piece = piece_of(attribute(state, "_local_tensor"), tensor,
                         box_of(tensor.shape, splits, mesh), rank.rank);
  if (numel(piece.slice) > 0) tensor.pieces.push_back(std::move(piece));
  return tensor;
}

}  // namespace tessera::sharded
