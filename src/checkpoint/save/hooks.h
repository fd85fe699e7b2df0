// What the functions of SaveOptions make of a save (checkpoint-rows P-20): names and dtypes of its
// leaves, and who writes what several ranks hold.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/save/planned_leaf.h"
#include "tessera/leaf.h"
#include "tessera/save_options.h"

namespace tessera {

// The leaves of a tree under their names and with their dtypes; elements are converted when they
// are read. Throws `conflict` for a name that is empty or that two leaves get, and for a dtype
// `unsupported` if there is no conversion to it and `invalid_argument` if one makes other numbers
// of what does not fit.
[[nodiscard]] std::vector<Leaf> leaves_to_save(std::vector<Leaf> leaves,
                                               const SaveOptions& options);

// A number that is another one if `writer` chooses otherwise for a placed part that several ranks
// hold; 0 if it has nothing to choose. Throws what the walk throws.
[[nodiscard]] std::uint64_t digest_of_choices(const std::vector<PlannedLeaf>& leaves, int ranks,
                                              const WriterFunction& writer);

}  // namespace tessera
