// Leaves: a tree of values as a list of names and values, and the way back.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "tessera/value.h"

namespace [[gnu::visibility("default")]] tessera {

// A dict key that is not a string.
struct DictKey {
  std::string text;  // how names write it: Python's str()
  Value key;
  bool operator==(const DictKey&) const = default;
};

// One step from a container to a child: a dict key or a list index. If a file has only names, every
// key is a string.
using PathPart = std::variant<std::string, std::int64_t, DictKey>;
using Path = std::vector<PathPart>;
[[nodiscard]] std::string step_text(const PathPart& part);
[[nodiscard]] std::string dotted(const Path& path);  // "model.layers.0.weight"

// Describes a dict on the way to a leaf, if it is more than a plain one.
struct Container {
  DictKind kind = DictKind::dict;
  std::optional<Value> state = {};            // Value::container_state
  std::optional<Value> default_factory = {};  // of a default_dict
  bool operator==(const Container&) const = default;
};
// For each step of a path, the dict that has the step as its key. Null: a plain dict, or a list.
using Containers = std::vector<std::shared_ptr<const Container>>;

struct Leaf {
  std::string name;  // dotted path, unique in a flattened tree
  Path path;
  Value value;
  std::shared_ptr<const Containers> containers = nullptr;  // null: all are plain
};

// The leaves of a tree by the rule of PyTorch's DCP. It always goes into dicts, but into lists only
// if they hold a tensor or a dict somewhere. Tuples, sets and the rest are leaves. Empty dicts
// disappear. FlattenRule::before_2_4 gives the rule before torch 2.4. Throws `conflict` if two
// leaves get one name, `invalid_argument` for a tree that contains itself, and `limit` for a tree
// of more than 2000 levels.
enum class FlattenRule { current, before_2_4 };
[[nodiscard]] std::vector<Leaf> flatten(const Value& tree, FlattenRule rule = FlattenRule::current);

// The leaves of a tree that a file holds as a tree. The rule is the same, but nothing gets lost.
// Below the root an empty dict is a leaf, too. Leaves whose dotted names are equal are named by
// their keys instead, "['a.b']" and "['a']['b']"; no two leaves share such a name.
[[nodiscard]] std::vector<Leaf> leaves_of(const Value& tree);

// The inverse of both, with the same kinds of dicts and the same types of keys. A leaf without a
// path goes under its name as one key. If leaves disagree about a dict, the first one counts.
// Throws `conflict` if a path runs through a leaf, and `incomplete` if list indices leave a hole.
[[nodiscard]] Value unflatten(const std::vector<Leaf>& leaves);

// Fills holes in lists: for every index that no leaf has, below a list's largest, it adds an empty
// dict as a leaf. PyTorch's rule leaves out empty dicts and nothing else. Holes stay if there are
// more than a real list can have. Returns the names of the leaves that were added.
std::vector<std::string> fill_holes(std::vector<Leaf>& leaves);

// What names tell.

// Whether a name is that of a part of an optimizer's state: "....exp_avg", "....exp_avg_sq", or one
// of its steps is "optim" or "optimizer", which "s", a number or "_..." may follow.
[[nodiscard]] bool is_optimizer_name(std::string_view name);

// Keys that ranks have of their own, as "dataloader.dp_rank_3" is one of four: each family by the
// name without the number, and its numbers, which are all from 0 on. The number ends the name or
// stands before a dot, behind "rank" or "rank_" at a word's end: "dp_rank_3.offset" is of the same.
[[nodiscard]] std::map<std::string, std::set<int>> keys_of_ranks(
    const std::vector<std::string>& names);

// What somebody should know who has `taken` some keys of a checkpoint and `left` others: of
// families of ranks that were taken in part, how many keys there are and how many were taken. A
// sentence for each. `ranks`: so many may each have taken as many, and nobody knows which.
[[nodiscard]] std::vector<std::string> notes_of_left_ranks(const std::vector<std::string>& taken,
                                                           const std::vector<std::string>& left,
                                                           int ranks = 1);

}  // namespace tessera
