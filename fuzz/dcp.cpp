// Whatever can be read can be written, and reads back; both ways to read agree.
#include <cstdlib>

#include "format/dcp/dcp.h"
#include "format/dcp/quick_decode.h"
#include "target.h"
#include "tessera/error.h"

namespace {

void require_agreement(tessera::ByteView input) {
  namespace dcp = tessera::dcp;
  const auto quick = dcp::quick_decode(input);
  if (!quick) return;
  try {
    if (dcp::encode(*quick) != dcp::encode(dcp::decode_values(input))) std::abort();
  } catch (const tessera::Error&) {
    std::abort();
  }
}

}  // namespace

void tessera::fuzz::parse(ByteView input) {
  require_agreement(input);
  (void)dcp::decode(dcp::encode(dcp::decode(input)));
}
