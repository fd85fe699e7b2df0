// Python objects as values: classes, attributes, numbers. Every refusal is `corrupt`.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "format/sharded/sharded.h"

namespace tessera::sharded {

[[noreturn]] void corrupt(std::string what);

// Whether `value` is the global `name` of a module below `package`. Modules moved between versions
// of torch, their names did not.
[[nodiscard]] bool is_global(const Value& value, std::string_view package, std::string_view name);
[[nodiscard]] bool is_instance(const Value& value, std::string_view package, std::string_view name);
// Whether `value` is a tensor of this subclass as torch pickles one: a rebuilder, the class, the
// rebuilder's arguments, a state.
[[nodiscard]] bool is_rebuilt_as(const Value& value, std::string_view package,
                                 std::string_view name);

// The attributes of an instance: its state, or the second of two when the class has slots.
[[nodiscard]] const Value& attributes(const Value& instance, std::string_view name);
[[nodiscard]] const Value& attribute(const Value& attributes, std::string_view name);
// An attribute that may be absent or None: null.
[[nodiscard]] const Value* optional_attribute(const Value& attributes, std::string_view name);

[[nodiscard]] std::int64_t integer(const Value& value, std::string_view what);
[[nodiscard]] Shape shape(const Value& value, std::string_view what);  // of a Size, tuple or list
[[nodiscard]] DType dtype(const Value& value);
[[nodiscard]] const Value::List& sequence(const Value& value, std::string_view what);

[[nodiscard]] bool is_sharded_tensor(const Value& value);
[[nodiscard]] Tensor read_sharded_tensor(const Value& value, const Rank& rank);
[[nodiscard]] bool is_dtensor(const Value& value);
[[nodiscard]] Tensor read_dtensor(const Value& value, const Rank& rank);
// The number of ranks of its mesh, or of the mesh that its mesh is a part of, if that is known.
[[nodiscard]] int ranks_of_dtensor(const Value& value);

// The part of one that a rank holds, with its size: the local tensors as they are in the file.
struct Local {
  Shape whole;
  Value::List tensors;
};
[[nodiscard]] Local local_of_sharded_tensor(const Value& value);
[[nodiscard]] Local local_of_dtensor(const Value& value);

// A leaf of what this rank holds, as the pieces of `whole` that `box` is; throws when the leaf is
// not of this size and type.
[[nodiscard]] Piece piece_of(const Value& local, const Tensor& whole, Box box, int rank);
// Pieces without elements are nobody's.
void add_unless_empty(Tensor& tensor, Piece piece);
// Throws unless `rank` is the one that the file is of.
void require_rank(std::int64_t found, const Rank& rank);
void require_world(std::int64_t found, const Rank& rank);

}  // namespace tessera::sharded
