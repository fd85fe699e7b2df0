// How the library says what tessera/log.h hands to the program.
#pragma once

#include <string_view>

#include "tessera/log.h"

namespace tessera {

// What concerns this process: a file, a rank.
void log(LogLevel level, std::string_view message);

// What every rank says alike. Only where no hook is set does it matter: rank 0 alone writes it.
void log_of_all(LogLevel level, std::string_view message);

}  // namespace tessera
