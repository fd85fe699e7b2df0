// Where compressed items lie. Nobody knows how long they are before they are written, so ranks tell
// it with the reports of their files.
#pragma once

#include <cstdint>
#include <vector>

#include "checkpoint/save/reports.h"
#include "checkpoint/save/save_plan.h"

namespace tessera {

// On rank 0; 8 bytes for each item, and as much for each file.
class ItemEnds {
 public:
  // Nothing is compressed.
  ItemEnds() = default;
  // Takes the lengths over. The reports are those that were planned (require_planned).
  explicit ItemEnds(Reports& reports);

  // Where the item lies that has this place in the plan.
  [[nodiscard]] ItemPlace of(int rank, const ItemPlace& planned) const;

 private:
  struct Rank {
    std::vector<std::uint64_t> ends;    // of the items of all its files, each counted from its file
    std::vector<std::uint64_t> firsts;  // by file: which of them is the first
  };
  std::vector<Rank> ranks_;
};

}  // namespace tessera
