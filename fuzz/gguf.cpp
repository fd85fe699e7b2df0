#include "format/gguf/gguf.h"
#include "target.h"

void tessera::fuzz::parse(ByteView input) {
  (void)gguf::read_header(*memory_source({input.begin(), input.end()}, "input"));
}
