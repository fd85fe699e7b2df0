// A tree of Python's objects as a Value.
#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "tessera/value.h"

namespace tessera::python {

namespace nb = nanobind;

struct Tree {
  Value value;
  std::vector<nb::object> kept;  // have the memory of its tensors
};
// Plain data, dicts, lists, tuples and sets, `tessera.Opaque`, and what `describe` knows: it
// returns None, or one of
//   ("tensor", its storage's address and bytes, its offset in elements, dtype, shape, strides,
//    requires_grad, parameter, who has the memory)
//   ("sharded", dtype, shape, parts, requires_grad, placement, who has the memory), of which the
//    parts are (address and bytes of a storage, offset in elements, strides, offsets, sizes) and
//    the placement is None or (parts, stride, dim) as layout.h has it
//   ("archive", the bytes of a torch.save)
//   ("value", another object), ("global", module, name), ("unsupported" or "mismatch", why)
//   ("ordered_dict", a dict, `_metadata` or None), ("default_dict", a dict, the factory or None)
// One object becomes one node. Throws `unsupported` with the key of
// anything else, and `invalid_argument` for a tree that contains itself.
[[nodiscard]] Tree tree_of(nb::handle tree, nb::object describe);

// What the bytes of a torch.save hold, with its tensors in memory: no class is imported and none is
// called.
[[nodiscard]] Value value_of_archive(const nb::bytes& bytes);

}  // namespace tessera::python
