// Whether a checkpoint of a run is whole.
#pragma once

#include <optional>
#include <string>

#include "tessera/error.h"
#include "tessera/run_directory.h"

namespace tessera {

// What is wrong with the checkpoint, as RunCheck says; none: nothing. Throws what says nothing
// about it, such as a store that does not answer.
[[nodiscard]] std::optional<Error> fault_of(const Location& where, const RunCheck& check);

}  // namespace tessera
