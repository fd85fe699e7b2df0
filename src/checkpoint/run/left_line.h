// Which checkpoints of a run are of a line that it has left, because it went on from an earlier
// step (fault-rows C11).
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "tessera/run_directory.h"

namespace tessera {

// By the names of their directories: the digests of their markers, when they were left. One that is
// saved again with another marker is not left any more.
//
// In the run it is the object `tessera-left.txt`, with a line "NAME DIGEST" for each; absent where
// there are none.
using LeftLine = std::map<std::string, std::uint64_t>;

// Throws `corrupt` for a record that write_left has not written.
[[nodiscard]] LeftLine read_left(const Store& run);
void write_left(Store& run, const LeftLine& left);

// Whether the checkpoint in that directory of the run is one of them.
[[nodiscard]] bool is_left(const LeftLine& left, const Location& run, const std::string& directory);

}  // namespace tessera
