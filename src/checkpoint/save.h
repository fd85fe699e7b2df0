// Saving, for who may have nothing to save.
#pragma once

#include <optional>

#include "tessera/checkpoint.h"
#include "tessera/error.h"

namespace tessera {

// save() of checkpoint.h, in which this rank takes part in any case: with a `failure` it has no
// tree, and that is the error of all ranks, as if the save had met it. No more is sent.
[[nodiscard]] SaveResult save_or_fail(const std::optional<Error>& failure, const Value& tree,
                                      const Location& where, const SaveOptions& options,
                                      Group& group);

}  // namespace tessera
