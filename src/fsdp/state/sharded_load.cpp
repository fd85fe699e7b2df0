#include "fsdp/state/sharded_load.h"

#include <algorithm>
#include <unordered_set>
#include <utility>

#include <torch/torch.h>

#include "base/copies.h"
#include "fsdp/state/state_dict.h"
#include "fsdp/unit/registry.h"
#include "fsdp/unit/whole_copies.h"
#include "layout/boxes.h"
#include "layout/plan.h"
#include "tessera/error.h"
#include "torch/tensor.h"

namespace tessera::detail {

void redistribute(const Shape& shape, const at::Tensor& from_array, std::span<const Part> from,
                  const at::Tensor& to_array, const Part& to) {
  if (numel(to.slice) == 0) return;
  std::vector<Slice> slices;
  slices.reserve(from.size());
  for (const auto& part : from) slices.push_back(part.slice);
  const std::span<const Slice> wanted(&to.slice, 1);
  const auto plan = plan_copies(shape, slices, wanted);
  require_filled(shape, wanted, plan);
  for (const auto& copy : plan) {
    copy_quietly(to_array, to.base + copy.to_local, from_array,
                 from[copy.from].base + copy.from_local, copy.count);
  }
}

Box chunk_of(const Shape& shape, int world, int rank) {
  return shape.empty() ? whole(shape) : tessera::chunk_of(whole(shape), 0, world, rank);
}

Tensor chunk_leaf(const at::Tensor& tensor, const Shape& shape, const Box& box) {
  auto leaf = leaf_of(tensor);
  leaf.shape = shape;
  leaf.sharded = true;
  leaf.pieces.front().slice = box;
  if (numel(box) == 0) leaf.pieces.clear();
  return leaf;
}

Piece piece_in(const Piece& piece, const at::Tensor& elements) {
  auto here = std::move(leaf_of(elements).pieces.front());
  here.slice = piece.slice;
  here.rank = piece.rank;
  return here;
}

at::Tensor tensor_of_piece(const Tensor& tensor, const Piece& piece) {
  Tensor part;
  part.dtype = tensor.dtype;
  part.shape = std::get<Box>(piece.slice).sizes;
  part.pieces = {{.slice = whole(part.shape),
                  .storage = piece.storage,
                  .storage_offset = piece.storage_offset,
                  .strides = piece.strides,
                  .conj = piece.conj,
                  .neg = piece.neg}};
  return tensor_of(part);
}

namespace {

bool holds_no_chunks(const Unit& unit) {
  return unit.has_shards() && unit.geometry() != Geometry::rows;
}

// The piece of `given` that lies where `piece` does.
const Piece& same_piece(const std::string& name, const Piece& piece, const Tensor& given) {
  const auto same = std::ranges::find_if(given.pieces, [&](const Piece& other) {
    return other.slice == piece.slice && other.storage != nullptr;
  });
  if (same != given.pieces.end()) return *same;
  throw Error(ErrorCode::mismatch,
              "the state has no part that is this rank's: it was made by other ranks or another "
              "kind of sharding; load it through a checkpoint")
      .at_key(name);
}

// This rank's chunk of a parameter of such a unit; undefined when there is none.
at::Tensor given_chunk(const std::string& name, const at::Tensor& parameter, const Unit& unit,
                       const Value& given) {
  const auto shape = parameter.sizes().vec();
  require_shape(name, shape, given);
  const auto mesh = unit.mesh();
  const auto box = chunk_of(shape, mesh.size(), mesh.rank());
  if (numel(box) == 0) return {};
  const auto& leaf = given.as_tensor();
  return tensor_of_piece(leaf, same_piece(name, {box, nullptr, 0, {}, -1}, leaf));
}

// Null: the state lacks it and may.
const Value* entry_of(const Value& state, const std::string& name, Names names) {
  const auto* given = state.find(name);
  if (given != nullptr || names == Names::partial) return given;
  throw Error(ErrorCode::mismatch, "the state lacks this name").at_key(name);
}

void require_no_more(const std::unordered_set<std::string>& known, const Value& state,
                     Names names) {
  if (names == Names::partial) return;
  for (const auto& [name, value] : state.pairs()) {
    if (!known.contains(name.as_string()))
      throw Error(ErrorCode::mismatch, "the module lacks this name").at_key(name.as_string());
  }
}

}  // namespace

std::vector<std::shared_ptr<Unit>> units_without_chunks(const torch::nn::Module& module) {
  std::vector<std::shared_ptr<Unit>> found;
  for (auto& [name, unit] : units_below(module)) {
    if (holds_no_chunks(*unit)) found.push_back(std::move(unit));
  }
  return found;
}

ShardedLoad::ShardedLoad(const torch::nn::Module& module, const Value& state, Names names)
    : units_(units_without_chunks(module)) {
  std::unordered_set<std::string> known;
  for (const auto& [name, tensor] : state_entries(module)) {
    known.insert(name);
    const auto* given = entry_of(state, name, names);
    if (given == nullptr) continue;
    const auto owner = find_owner(tensor);
    if (owner.unit && holds_no_chunks(*owner.unit)) {
      chunks_[tensor.unsafeGetTensorImpl()] = given_chunk(name, tensor, *owner.unit, *given);
    } else {
      plan(name, own_leaf(tensor), *given);
    }
  }
  require_no_more(known, state, names);
}

ShardedLoad::ShardedLoad(const Value& mine, const Value& state) {
  std::unordered_set<std::string> known;
  for (const auto& [key, value] : mine.pairs()) {
    const auto& name = key.as_string();
    known.insert(name);
    plan(name, value.as_tensor(), *entry_of(state, name, Names::same));
  }
  require_no_more(known, state, Names::same);
}

// Plans the copies from `given` to each piece of `mine`.
void ShardedLoad::plan(const std::string& name, const Tensor& mine, const Value& given) {
  require_shape(name, mine.shape, given);
  const auto& leaf = given.as_tensor();
  for (const auto& piece : mine.pieces) {
    copies_.push_back(
        {tensor_of_piece(mine, piece), tensor_of_piece(leaf, same_piece(name, piece, leaf))});
  }
}

void ShardedLoad::apply() const {
  const torch::NoGradGuard no_grad;
  await_copies();
  for (const auto& copy : copies_) copy.to.copy_(copy.from);
  for (const auto& unit : units_) take_chunks(*unit);
}

// This rank's chunks, as `rows` has them.
at::Tensor ShardedLoad::joined_chunks(const Unit& unit, const UnitLayout& rows) const {
  const auto mine = at::zeros({rows.shard_elements}, unit.shard().options());
  for (std::size_t i = 0; i < unit.params().size(); ++i) {
    const auto chunk = chunks_.find(unit.params()[i].full.unsafeGetTensorImpl());
    if (chunk == chunks_.end() || !chunk->second.defined()) continue;
    mine.narrow(0, rows.parts[unit.mesh().rank()][i].base, chunk->second.numel())
        .copy_(chunk->second.contiguous().view({-1}));
  }
  return mine;
}

// Each rank takes its own parts out of the chunks of all.
void ShardedLoad::take_chunks(const Unit& unit) const {
  std::vector<Shape> shapes;
  for (const auto& place : unit.layout().params) shapes.push_back(place.shape);
  const auto mesh = unit.mesh();
  const auto rows = rows_layout(shapes, mesh.size(), 1);
  const auto all = unit.whole().exchange(joined_chunks(unit, rows));
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    if (!chunks_.contains(unit.params()[i].full.unsafeGetTensorImpl())) continue;
    redistribute(shapes[i], all, parts_of(rows, i), unit.shard(), part_of(unit, i, mesh.rank()));
  }
  // Nothing of this tells autograd, nor the unit that its shard has changed.
  torch::autograd::impl::bump_version(unit.shard());
}

}  // namespace tessera::detail
