// What killed saves and replaced checkpoints left in a DCP directory.
#pragma once

#include <string>
#include <vector>

#include "tessera/storage.h"

namespace tessera {

// Probes, and data files and side files that are not the present checkpoint's own_files(). Without
// a checkpoint only those with names of ours: they belong to nobody, or to a save that goes on.
[[nodiscard]] std::vector<std::string> leftovers_in(const Store& store);

// The same; none where the checkpoint that is there cannot be read or is damaged.
[[nodiscard]] std::vector<std::string> known_leftovers(const Store& store);

// Removes these and unfinished files. Only while nobody writes.
void remove_leftovers(Store& store);

// What a save or conversion removes of them.
class Leftovers {
 public:
  // At its begin, after it has looked which checkpoint is there. If nobody else writes, they go now
  // and make room. Else some may be a rival's, and wait.
  void find(Store& store, bool is_alone);
  // After the commit. Rivals that had files by then have lost, because another checkpoint is there
  // than they have planned on.
  void after_commit(Store& store) const noexcept;

 private:
  std::vector<std::string> waiting_;
};

}  // namespace tessera
