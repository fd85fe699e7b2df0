// Leaves: a tree of values as a list of names and what they stand for, and the way back.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "tessera/value.h"

namespace tessera {

// A dict's key that is no string.
struct DictKey {
  std::string text;  // what names have for it: Python's str()
  Value key;
  bool operator==(const DictKey&) const = default;
};

// One step from a container to a child: a dict key or a list index. Where a file has names only,
// every key is a string.
using PathPart = std::variant<std::string, std::int64_t, DictKey>;
using Path = std::vector<PathPart>;
[[nodiscard]] std::string step_text(const PathPart& part);
[[nodiscard]] std::string dotted(const Path& path);  // "model.layers.0.weight"

// What a dict on the way to a leaf is, where it is more than a plain one.
struct Container {
  DictKind kind = DictKind::dict;
  std::optional<Value> state = {};            // Value::container_state
  std::optional<Value> default_factory = {};  // of a default_dict
  bool operator==(const Container&) const = default;
};
// By step of a path: the dict whose key the step is. Null: a plain dict, or a list.
using Containers = std::vector<std::shared_ptr<const Container>>;

struct Leaf {
  std::string name;  // dotted path, unique in a flattened tree
  Path path;
  Value value;
  std::shared_ptr<const Containers> containers = nullptr;  // null: all are plain
};

// The leaves of a tree by PyTorch DCP's rule: dicts are always descended, lists only
// when they hold a tensor or a dict somewhere; tuples, sets and the rest are leaves; empty dicts
// disappear. `descend_lists_always` false gives the rule before torch 2.4. Throws `conflict`
// when two leaves get one name, `invalid_argument` for a tree that contains itself and `limit` for
// one of more than 2000 levels.
enum class FlattenRule { current, before_2_4 };
[[nodiscard]] std::vector<Leaf> flatten(const Value& tree, FlattenRule rule = FlattenRule::current);

// The leaves of a tree that a file holds as a tree. The same rule, but nothing gets lost: below the
// root an empty dict is a leaf too, and leaves whose dotted names are equal are named by their keys
// instead, "['a.b']" and "['a']['b']", which no two have in common.
[[nodiscard]] std::vector<Leaf> leaves_of(const Value& tree);

// The inverse of both: the same kinds of dicts with the same types of keys. A leaf without a path
// goes under its name as one key; where leaves disagree about a dict the first one counts. Throws
// `conflict` when a path runs through a leaf and `incomplete` when list indices leave a hole.
[[nodiscard]] Value unflatten(const std::vector<Leaf>& leaves);

// Adds an empty dict as a leaf for every index below a list's largest that no leaf has: PyTorch's
// rule leaves out empty dicts and nothing else. Holes in numbers that no real list has stay.
// Returns the names of those that were added.
std::vector<std::string> fill_holes(std::vector<Leaf>& leaves);

}  // namespace tessera
