#include "format/safetensors/index.h"
#include "target.h"

void tessera::fuzz::parse(ByteView input) {
  (void)safetensors::read_index(input);
}
