// Directories that are made for work which may fail.
#pragma once

#include <string>
#include <vector>

#include "base/fork.h"

namespace tessera {

class NewDirectories {
 public:
  // Notes which of `path` and the directories above it are not there yet; somebody else makes them.
  explicit NewDirectories(const std::string& path);
  NewDirectories(const NewDirectories&) = delete;
  NewDirectories& operator=(const NewDirectories&) = delete;
  // Removes those that were not there, as far as they are empty, unless the work was done.
  ~NewDirectories();
  void keep() noexcept { missing_.clear(); }

 private:
  MadeHere made_here_;
  std::vector<std::string> missing_;  // innermost first
};

}  // namespace tessera
