#include "value/size.h"

namespace tessera {
namespace {

using Kind = Value::Kind;

std::optional<Shape> shape_of(const Value::List& items) {
  Shape shape;
  shape.reserve(items.size());
  for (const Value& item : items) {
    if (!item.is(Kind::integer) || !item.as_integer().big.empty()) return std::nullopt;
    shape.push_back(item.as_integer().small);
  }
  return shape;
}

std::optional<Shape> shape_of(const Object& object) {
  if (object.name() != "torch.Size" || !object.arguments.is(Kind::tuple)) return std::nullopt;
  const Value::List& given = object.arguments.items();
  if (given.empty()) return Shape();
  if (given.size() != 1 || given[0].is(Kind::object)) return std::nullopt;
  return size_from(given[0]);
}

}  // namespace

std::optional<Shape> size_from(const Value& value) {
  if (value.is(Kind::tuple) || value.is(Kind::list)) return shape_of(value.items());
  return value.is(Kind::object) ? shape_of(value.as_object()) : std::nullopt;
}

Value size_object(const Shape& shape) {
  Value::List items(shape.begin(), shape.end());
  return Value::object({.callable = Value::global("torch", "Size"),
                        .arguments = Value::tuple({Value::tuple(std::move(items))})});
}

}  // namespace tessera
