// Arrays and scalars of numpy that a pickle describes, as tensors.
//
// In a tree they are objects: what is written from it is what they were. Their bytes are in the
// tree, in the order of bytes and of dimensions that they were pickled in.
#pragma once

#include <optional>

#include "tessera/value.h"

namespace [[gnu::visibility("default")]] tessera {

struct NumpyArray {
  Tensor tensor;           // one piece: a box with all elements, and `data` in its storage
  bool is_scalar = false;  // one number, of a class such as numpy.float64
};

// What `value` describes, if that is an array or scalar of numpy of booleans, integers, floats or
// complex numbers that a dtype of Tessera has: of either order of bytes, and of rows or columns.
// nullopt: anything else. That is so for texts, dates, records and objects of Python, for classes
// derived from numpy's, and for bytes that are not as many as the shape asks for.
//
// The tensor's memory is that of `value`, which it keeps, or a copy with the bytes of each number
// turned around where they were big-endian. It is to be read alone.
[[nodiscard]] std::optional<NumpyArray> numpy_array(const Value& value);

}  // namespace tessera
