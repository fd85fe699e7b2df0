#include "format/zip/zip.h"
#include "target.h"

void tessera::fuzz::parse(ByteView input) {
  const zip::Archive archive(memory_source({input.begin(), input.end()}, "input"));
  for (const zip::Entry& entry : archive.entries()) (void)archive.read(entry, 1 << 20);
}
