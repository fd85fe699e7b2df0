#include "format/olmo/yaml.h"
#include "target.h"

void tessera::fuzz::parse(ByteView input) {
  (void)olmo::parse_yaml(input);
}
