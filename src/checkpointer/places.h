// Where the files of a checkpoint are.
#pragma once

#include <optional>
#include <string>

#include "tessera/storage.h"

namespace tessera::detail {

// What is called `name` in the directory or the store at `where`.
[[nodiscard]] Location inside(const Location& where, const std::string& name);

// The directory `where`, read through a cache if there is one.
[[nodiscard]] Location seen_through(const Location& where, const std::optional<Location>& cache);

}  // namespace tessera::detail
