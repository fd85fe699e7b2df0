// The entry that libFuzzer calls.
#include "target.h"
#include "tessera/error.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    tessera::fuzz::parse({reinterpret_cast<const std::byte*>(data), size});
  } catch (const tessera::Error&) {
    return 0;
  }
  return 0;
}
