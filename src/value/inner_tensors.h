// Tensors inside values that are no tensors: in tuples, in objects, as keys.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tessera/layout.h"
#include "tessera/leaf.h"
#include "tessera/value.h"

namespace tessera {

struct InnerTensor {
  std::string path;               // the way to it, ".1.state._scale", for messages
  const Value* tensor = nullptr;  // a node of the value
};

// Every tensor below `value`, itself left out, at any depth; a node that is there several times
// comes once. Valid while `value` is not changed.
#pragma GCC visibility push(default)  // the command links it, see cmake/TesseraShared.cmake
[[nodiscard]] std::vector<InnerTensor> inner_tensors(const Value& value);
#pragma GCC visibility pop

struct NamedTensor {
  std::string name;  // of the leaf, and the way from it
  Value tensor;
};

// Every tensor node of these leaves, themselves and what is inside of them, once: under the first
// name that leads to it.
[[nodiscard]] std::vector<NamedTensor> all_tensors(const std::vector<Leaf>& leaves);

// torch.Size as data.

// The sizes that `value` stands for: a tuple or list of integers, or an object torch.Size((...)).
// None when it is something else or a number leaves 64 bits.
[[nodiscard]] std::optional<Shape> size_from(const Value& value);

// The object torch.Size((...)).
[[nodiscard]] Value size_object(const Shape& shape);

}  // namespace tessera
