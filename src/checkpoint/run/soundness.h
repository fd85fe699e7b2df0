// Whether a checkpoint of a run is whole.
#pragma once

#include <optional>
#include <string>

#include "format/sharded/sharded.h"
#include "tessera/error.h"
#include "tessera/run_directory.h"

namespace tessera {

// What is wrong with the checkpoint, as RunCheck says; none: nothing. Throws what says nothing
// about it, such as a store that does not answer.
[[nodiscard]] std::optional<Error> fault_of(const Location& where, const RunCheck& check);
// The same of the files that one rank has of it, where those of others are on other disks: an
// olmo-local or olmo-legacy checkpoint of so many ranks.
[[nodiscard]] std::optional<Error> own_fault_of(const Location& where, const RunCheck& check,
                                                const sharded::Rank& rank);

}  // namespace tessera
