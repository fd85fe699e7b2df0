// Python objects as values, for the writers of this folder.
#pragma once

#include <string>
#include <utility>

#include "tessera/dtype.h"
#include "tessera/layout.h"
#include "tessera/value.h"

namespace tessera::olmo {

inline Value call(Value callable, Value::List arguments) {
  return Value::object(
      {.callable = std::move(callable), .arguments = Value::tuple(std::move(arguments))});
}

// cls.__new__(cls), then this state.
inline Value instance(Value cls, Value state) {
  return Value::object({.callable = std::move(cls),
                        .arguments = Value::tuple(),
                        .by_new = true,
                        .state = std::move(state)});
}

inline Value list_of(const Shape& shape) {
  return Value::list({shape.begin(), shape.end()});
}

inline Value tuple_of(const Shape& shape) {
  return Value::tuple({shape.begin(), shape.end()});
}

inline Value size_object(const Shape& shape) {
  return call(Value::global("torch", "Size"), {tuple_of(shape)});
}

inline Value dtype_global(DType dtype) {
  return Value::global("torch", std::string(info(dtype).torch));
}

}  // namespace tessera::olmo
