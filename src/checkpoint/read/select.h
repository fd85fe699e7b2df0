// What a conversion changes in the list of leaves before any byte is read.
#pragma once

#include <string>
#include <vector>

#include "tessera/dtype.h"
#include "tessera/leaf.h"
#include "tessera/value.h"

#pragma GCC visibility push(default)  // the command links it, see cmake/TesseraShared.cmake
namespace tessera {

// The leaves that one of `only` selects; all when it is empty. "model" and "optim" select the
// model's and the optimizer's state, anything else is a key as in Checkpoint::only. Throws
// `not_found` for one that selects nothing; `path` is the checkpoint's.
[[nodiscard]] std::vector<Leaf> select(const std::vector<Leaf>& leaves,
                                       const std::vector<std::string>& only,
                                       const std::string& path);
// The same, and the keys that select nothing instead of an error.
struct Selection {
  std::vector<Leaf> leaves;
  std::vector<std::string> unmatched;
};
[[nodiscard]] Selection select_what_is_there(const std::vector<Leaf>& leaves,
                                             const std::vector<std::string>& only);

// Whether the leaf belongs to an optimizer's state: below a step of its path that says so, or
// AdamW's by its own name.
[[nodiscard]] bool is_optimizer_state(const Leaf& leaf);

// Applies each rule "RE=>TO" to every name, in order: all places that match the regular expression
// (RE2's syntax, base/expression.h) become TO, in which `\1` and `$1` are the first group. Steps of
// a path that a name keeps at its ends stay steps; what changed between them is one key. Throws
// `invalid_argument` for a rule that is none, `conflict` when two leaves get one name or one loses
// its name.
void rename(std::vector<Leaf>& leaves, const std::vector<std::string>& rules);

// Gives one leaf another name that is not empty; its path as above.
void rename(Leaf& leaf, std::string name);

// Floating tensors of 16 bits and more become `dtype`: their bytes are converted when they are
// read.
void convert_floating(std::vector<Leaf>& leaves, DType dtype);

}  // namespace tessera
#pragma GCC visibility pop
