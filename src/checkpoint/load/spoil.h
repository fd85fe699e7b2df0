// What becomes of the memory of a load that failed while it was filling it.
#pragma once

#include <vector>

#include "checkpoint/load/fill.h"
#include "tessera/error.h"

namespace tessera {

// As spoiled() of tessera/restore.h: overwrites what the fillings were to fill.
[[nodiscard]] Error spoiled(const std::vector<Filling>& fillings, const Error& failure);

}  // namespace tessera
