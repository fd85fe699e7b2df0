#include "value/size.h"

namespace tessera {

std::optional<Shape> size_from(const Value& value) {
  using Kind = Value::Kind;
  if (value.is(Kind::object)) {
    const Object& object = value.as_object();
    if (object.name() != "torch.Size" || !object.arguments.is(Kind::tuple)) return std::nullopt;
    if (object.arguments.size() == 0) return Shape();
    if (object.arguments.size() != 1 || object.arguments.items()[0].is(Kind::object)) {
      return std::nullopt;
    }
    return size_from(object.arguments.items()[0]);
  }
  if (!value.is(Kind::tuple) && !value.is(Kind::list)) return std::nullopt;
  Shape shape;
  shape.reserve(value.size());
  for (const Value& item : value.items()) {
    if (!item.is(Kind::integer) || !item.as_integer().big.empty()) return std::nullopt;
    shape.push_back(item.as_integer().small);
  }
  return shape;
}

Value size_object(const Shape& shape) {
  Value::List items(shape.begin(), shape.end());
  return Value::object({.callable = Value::global("torch", "Size"),
                        .arguments = Value::tuple({Value::tuple(std::move(items))})});
}

}  // namespace tessera
