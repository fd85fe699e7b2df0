#include "format/safetensors/safetensors.h"
#include "target.h"

void tessera::fuzz::parse(ByteView input) {
  (void)safetensors::read_header(*memory_source({input.begin(), input.end()}, "input"));
}
