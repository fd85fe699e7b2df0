// What a fuzz target defines. An Error is a proper answer to any input; another exception, a crash,
// a sanitizer's report or an endless run is a finding.
#pragma once

#include "tessera/io.h"

namespace tessera::fuzz {

void parse(ByteView input);

}  // namespace tessera::fuzz
