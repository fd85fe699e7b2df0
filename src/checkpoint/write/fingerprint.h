// What tells whether unfinished work, or a finished target, is that of one conversion.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/checkpoint.h"
#include "tessera/convert.h"

namespace tessera {

// Of everything that decides about the target's bytes: the files of `source` with their sizes and
// times, where each of `leaves` lies in them, the target's name, the options, our version.
[[nodiscard]] std::uint64_t fingerprint_of(const Checkpoint& source,
                                           const std::vector<Leaf>& leaves,
                                           const std::string& target,
                                           const ConvertOptions& options);

// Of the sizes and times of the files `names` in `directory`, which moving them does not change.
// None: one of them is not there.
[[nodiscard]] std::optional<std::uint64_t> identity_of(const std::string& directory,
                                                       const std::vector<std::string>& names);

}  // namespace tessera
