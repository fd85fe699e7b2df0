#include "format/sharded/attributes.h"

#include "base/text.h"
#include "tessera/error.h"
#include "value/inner_tensors.h"
#include "value/render.h"

namespace tessera::sharded {

using Kind = Value::Kind;

namespace {

// The attributes in an instance's state; null: there are none.
const Value* attributes_in(const Value& state) {
  if (state.is(Kind::dict)) return &state;
  const bool slots = state.is(Kind::tuple) && state.size() == 2 && state.items()[1].is(Kind::dict);
  return slots ? &state.items()[1] : nullptr;
}

void require_shard_of(const Tensor& whole, const Tensor& shard, const Box& box) {
  if (shard.shape != box.sizes) {
    corrupt("a shard has shape " + to_string(shard.shape) + ", its place " + to_string(box.sizes));
  }
  if (shard.dtype != whole.dtype) {
    corrupt("a shard holds " + std::string(to_string(shard.dtype)) + ", the tensor " +
            std::string(to_string(whole.dtype)));
  }
  require_inside(box, whole.shape);
}

}  // namespace

void corrupt(std::string what) {
  throw Error(ErrorCode::corrupt, std::move(what));
}

bool is_global(const Value& value, std::string_view package, std::string_view name) {
  return value.is(Kind::global) && value.global_name() == name &&
         value.global_module().starts_with(package);
}

bool is_instance(const Value& value, std::string_view package, std::string_view name) {
  return value.is(Kind::object) && is_global(value.as_object().callable, package, name);
}

bool is_rebuilt_as(const Value& value, std::string_view package, std::string_view name) {
  if (!is_instance(value, "torch._tensor", "_rebuild_from_type_v2")) return false;
  const Value& arguments = value.as_object().arguments;
  return arguments.size() == 4 && is_global(arguments.items()[1], package, name);
}

const Value& attributes(const Value& instance, std::string_view name) {
  const bool has_state = instance.is(Kind::object) && instance.as_object().state;
  const Value* found = has_state ? attributes_in(*instance.as_object().state) : nullptr;
  if (found == nullptr) {
    corrupt("found " + render(instance, 60) + ", expected a " + std::string(name));
  }
  return *found;
}

const Value& attribute(const Value& attributes, std::string_view name) {
  const Value* found = attributes.is(Kind::dict) ? attributes.find(name) : nullptr;
  if (found == nullptr) corrupt("attribute " + std::string(name) + " is missing");
  return *found;
}

const Value* optional_attribute(const Value& attributes, std::string_view name) {
  const Value* found = attributes.find(name);
  return found == nullptr || found->is(Kind::none) ? nullptr : found;
}

std::int64_t integer(const Value& value, std::string_view what) {
  if (!value.is(Kind::integer) || !value.as_integer().big.empty()) {
    corrupt(std::string(what) + " is " + render(value, 60) + ", expected a number");
  }
  return value.as_int();
}

Shape shape(const Value& value, std::string_view what) {
  auto found = size_from(value);
  if (!found) corrupt(std::string(what) + " is " + render(value, 60) + ", expected sizes");
  (void)numel(*found);
  return std::move(*found);
}

DType dtype(const Value& value) {
  if (!is_global(value, "torch", value.is(Kind::global) ? value.global_name() : "")) {
    corrupt("found " + render(value, 60) + ", expected a dtype");
  }
  return dtype_from_torch(value.global_name());
}

const Value::List& sequence(const Value& value, std::string_view what) {
  if (!is_one_of(value.kind(), Kind::list, Kind::tuple)) {
    corrupt(std::string(what) + " is " + render(value, 60) + ", expected a list");
  }
  return value.items();
}

Piece piece_of(const Value& local, const Tensor& whole, Box box, int rank) {
  if (!local.is(Kind::tensor) || local.as_tensor().bare_storage) {
    corrupt("a shard is " + std::string(describe(local.kind())) + ", expected a tensor");
  }
  const Tensor& tensor = local.as_tensor();
  require_shard_of(whole, tensor, box);
  Piece piece = tensor.pieces.at(0);
  piece.slice = std::move(box);
  piece.rank = rank;
  return piece;
}

void add_unless_empty(Tensor& tensor, Piece piece) {
  if (numel(piece.slice) > 0) tensor.pieces.push_back(std::move(piece));
}

void require_rank(std::int64_t found, const Rank& rank) {
  if (found != rank.rank) {
    corrupt("the shard is rank " + std::to_string(found) + "'s, the file rank " +
            std::to_string(rank.rank) + "'s");
  }
}

void require_world(std::int64_t found, const Rank& rank) {
  if (found == rank.world) return;
  throw Error(found > rank.world ? ErrorCode::incomplete : ErrorCode::corrupt,
              "the tensor is of " + std::to_string(found) + " ranks, there are files of " +
                  std::to_string(rank.world));
}

}  // namespace tessera::sharded
