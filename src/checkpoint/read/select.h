// The leaves of a checkpoint that somebody wants, and what a conversion makes of them before it
// reads.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/layout.h"
#include "tessera/leaf.h"
#include "tessera/value.h"

namespace tessera {

class Choice {
 public:
  explicit Choice(const std::vector<Leaf>& leaves);  // they outlive this

  // Adds the leaf of that name, and those whose names begin with `key` and a dot; if there are
  // none, those of the name that is printed as `key`; if there are none, those whose names the glob
  // fits. Returns whether there are any.
  bool add(const std::string& key);
  // The same of what somebody has read: the name that is printed so comes before the one that is
  // so.
  bool add_printed(const std::string& key);
  // Adds those that fit, and returns whether there are any.
  template <typename Fits>
  bool add_if(const Fits& fits) {
    bool found = false;
    for (std::size_t i = 0; i < leaves_.size(); ++i) {
      if (fits(leaves_[i])) chosen_[i] = found = true;
    }
    return found;
  }

  [[nodiscard]] bool has(std::size_t leaf) const { return chosen_[leaf]; }

 private:
  [[nodiscard]] std::string_view name_at(std::size_t at) const { return leaves_[at].name; }
  void sort_names();
  template <typename Fits>
  bool add_from(std::string_view first, const Fits& fits);
  bool add_named(const std::string& name);
  bool add_glob(const std::string& glob);

  const std::vector<Leaf>& leaves_;
  std::vector<std::size_t> by_name_;  // empty until it is needed
  std::vector<bool> chosen_;
};

// Throws `not_found` for a key that chooses nothing, with one that may have been meant.
#pragma GCC visibility push(default)  // the command links it, see cmake/TesseraShared.cmake
[[noreturn]] void refuse_key(const std::string& key, const std::vector<Leaf>& leaves,
                             const std::string& path);
#pragma GCC visibility pop

}  // namespace tessera

#pragma GCC visibility push(default)  // the command links it, see cmake/TesseraShared.cmake
namespace tessera {

// Changes of a conversion to the list of leaves before any byte is read.

struct Selection {
  std::vector<Leaf> leaves;
  std::vector<std::string> unmatched;  // keys that select nothing
  std::vector<std::string> notes;      // what a key may not have meant
};
// The leaves that one of `only` selects; all when it is empty. "model" and "optim" select the
// model's and the optimizer's state, anything else is a key as in Checkpoint::only. Throws
// `not_found` for one that selects nothing; `path` is the checkpoint's.
[[nodiscard]] Selection select(const std::vector<Leaf>& leaves,
                               const std::vector<std::string>& only, const std::string& path);
// The same without an error.
[[nodiscard]] Selection select_what_is_there(const std::vector<Leaf>& leaves,
                                             const std::vector<std::string>& only);

// Whether the leaf belongs to an optimizer's state: below a step of its path that says so, or
// AdamW's by its own name.
[[nodiscard]] bool is_optimizer_state(const Leaf& leaf);

// Applies each rule "RE=>TO" to every name, in order: all places that match the regular expression
// (RE2's syntax, base/expression.h) become TO, in which `\1` and `$1` are the first group. Steps of
// a path that a name keeps at its ends stay steps; what changed between them is one key. Throws
// `invalid_argument` for a rule that is none, `conflict` when two leaves get one name or one loses
// its name. Answers what a rule may not have meant: it changes no name, or has a second `=>`.
std::vector<std::string> rename(std::vector<Leaf>& leaves, const std::vector<std::string>& rules);

// Gives one leaf another name that is not empty; its path as above.
void rename(Leaf& leaf, std::string name);

// Floating tensors of 16 bits and more become `dtype`: their bytes are converted when they are
// read.
void convert_floating(std::vector<Leaf>& leaves, DType dtype);

}  // namespace tessera
#pragma GCC visibility pop
