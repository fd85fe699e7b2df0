#include "format/olmo/flat_param.h"

#include <algorithm>

#include "base/numbers.h"
#include "format/olmo/sharded_tensor.h"
#include "tessera/error.h"

namespace tessera::olmo {
namespace {

constexpr std::int64_t kAlignment = 16;  // bytes, as FSDP1

}  // namespace

FlatGeometry::FlatGeometry(const std::vector<Shape>& shapes, DType dtype, int world, bool aligned) {
  if (world < 1) {
    throw Error(ErrorCode::invalid_argument, std::to_string(world) + " ranks, expected 1 or more");
  }
  const auto element = static_cast<std::int64_t>(size_of(dtype));
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    if (aligned) pad_to(std::max<std::int64_t>(kAlignment / element, 1));
    numels_.push_back(numel(shapes[i]));
    extents_.push_back({i, numels_.back()});
    total_ = checked_add(total_, numels_.back());
  }
  if (aligned) pad_to(world);
  shard_size_ = total_ / world + (total_ % world == 0 ? 0 : 1);
}

void FlatGeometry::pad_to(std::int64_t multiple) {
  const std::int64_t missing = (multiple - total_ % multiple) % multiple;
  if (missing == 0) return;
  extents_.push_back({kPadding, missing});
  total_ = checked_add(total_, missing);
}

std::vector<FlatGeometry::Segment> FlatGeometry::shard(int rank) const {
  const std::int64_t first = checked_mul<std::int64_t>(shard_size_, rank);
  const std::int64_t last = checked_add(first, shard_size_);
  std::vector<Segment> segments;
  std::int64_t at = 0;
  for (const Extent& extent : extents_) {
    const std::int64_t begin = std::max(first, at);
    const std::int64_t end = std::min(last, at + extent.count);
    if (begin < end) segments.push_back({extent.param, begin - at, end - begin, begin - first});
    at += extent.count;
  }
  if (const std::int64_t zeros = shard_padding(rank); zeros > 0) {
    segments.push_back({kPadding, 0, zeros, shard_size_ - zeros});
  }
  return segments;
}

std::int64_t FlatGeometry::shard_padding(int rank) const {
  const std::int64_t first = checked_mul<std::int64_t>(shard_size_, rank);
  return shard_size_ - std::clamp<std::int64_t>(total_ - first, 0, shard_size_);
}

std::vector<std::int64_t> FlatGeometry::numels_with_padding() const {
  std::vector<std::int64_t> numels;
  for (const Extent& extent : extents_) numels.push_back(extent.count);
  return numels;
}

Value HandleMaker::name_of(const std::string& fqn) {
  // "weight" is the attribute's own string, "norm.weight" a new one each time.
  if (fqn.find('.') != std::string::npos) return fqn;
  return names_.emplace(fqn, fqn).first->second;
}

Value HandleMaker::param_infos(const FlatGeometry& geometry, int rank) {
  const Value cls = Value::global("torch.distributed.fsdp._flat_param", "_ShardParamInfo");
  std::vector<Value> arguments(geometry.numels().size());
  for (const FlatGeometry::Segment& segment : geometry.shard(rank)) {
    if (segment.param == FlatGeometry::kPadding) continue;
    arguments[segment.param] = Value::tuple(
        {true, segment.offset, segment.count, segment.begin, segment.begin + segment.count - 1});
  }
  Value::List infos;
  for (Value& given : arguments) {
    if (!given.is(Value::Kind::tuple)) given = Value::tuple({false, {}, {}, {}, {}});
    infos.push_back(
        Value::object({.callable = cls, .arguments = std::move(given), .by_new = true}));
  }
  return Value::tuple(std::move(infos));
}

Value HandleMaker::module(const std::string& name, const std::vector<std::string>& fqns,
                          const std::vector<Shape>& shapes, const FlatGeometry& geometry, int rank,
                          const Value& data) {
  Value names = Value::list();
  Value sizes = Value::list();
  for (const std::string& fqn : fqns) names.items().push_back(name_of(fqn));
  for (const Shape& shape : shapes) sizes.items().push_back(size_object(shape));
  Value handle =
      Value::dict({{data_, data},
                   {"flat_param._fqns", std::move(names)},
                   {"flat_param._numels", tuple_of(geometry.numels())},
                   {"flat_param._numels_with_padding", tuple_of(geometry.numels_with_padding())},
                   {"flat_param._shapes", std::move(sizes)},
                   {"flat_param._shard_numel_padded", geometry.shard_padding(rank)},
                   {"flat_param._shard_param_infos", param_infos(geometry, rank)}});
  return Value::dict({{handles_, Value::list({std::move(handle)})}, {name_, name}});
}

Value HandleMaker::empty_module(const std::string& name) {
  return Value::dict({{handles_, Value::list()}, {name_, name}});
}

}  // namespace tessera::olmo
