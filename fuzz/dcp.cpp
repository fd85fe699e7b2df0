// Whatever can be read can be written, and reads back.
#include "format/dcp/dcp.h"
#include "target.h"

void tessera::fuzz::parse(ByteView input) {
  (void)dcp::decode(dcp::encode(dcp::decode(input)));
}
