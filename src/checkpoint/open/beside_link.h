// What there is beside a link that leads nowhere.
#pragma once

#include <string>

namespace tessera {

// The name of the newest checkpoint of a run ("step400", "step400-unsharded") that lies in the same
// directory as `link` and can be opened; empty: there is none. Nothing takes the place of what the
// link means: its error names this one (fault-rows C09).
[[nodiscard]] std::string newest_beside(const std::string& link);

}  // namespace tessera
