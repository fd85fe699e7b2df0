// Which of a checkpoint's leaves somebody wants.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/leaf.h"

namespace tessera {

class Choice {
 public:
  explicit Choice(const std::vector<Leaf>& leaves);  // they outlive this

  // Adds the leaf of that name, and those whose names begin with `key` and a dot; if there are
  // none, those whose names the glob fits. Returns whether there are any.
  bool add(const std::string& key);
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
  bool add_glob(const std::string& glob);

  const std::vector<Leaf>& leaves_;
  std::vector<std::size_t> by_name_;  // empty until it is needed
  std::vector<bool> chosen_;
};

// Throws `not_found` for a key that chooses nothing, with one that may have been meant.
[[noreturn]] void refuse_key(const std::string& key, const std::vector<Leaf>& leaves,
                             const std::string& path);

}  // namespace tessera
