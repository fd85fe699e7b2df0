// Values of a checkpoint as objects of Python.
#pragma once

#include <nanobind/nanobind.h>

#include "tensors.h"
#include "tessera/value.h"

namespace tessera::python {

// Plain data as Python's own objects, values of the classes in tessera/_known.py as what they are,
// everything else as `tessera.Opaque`: no class is imported or called because a file names it. One
// node becomes one object. A tensor becomes what `wrap` makes of its `_core.Tensor`. Throws
// `unsupported` for a key of a dict or a member of a set that Python cannot hash.
[[nodiscard]] nb::object object_of(const Value& value, nb::object wrap);

// Whether a tensor is anywhere below it.
[[nodiscard]] bool holds_tensors(const Value& value);

}  // namespace tessera::python
