#include "format/olmo/config.h"
#include "target.h"

void tessera::fuzz::parse(ByteView input) {
  (void)olmo::parse_yaml(input);
}
