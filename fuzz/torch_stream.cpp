// Streams from before torch 1.6; what reads can be written as an archive, and reads back.
#include <stdexcept>

#include "format/torch/torch_file.h"
#include "target.h"

void tessera::fuzz::parse(ByteView input) {
  const Value tree = torch_file::read(memory_source({input.begin(), input.end()}, "input"));
  const torch_file::Writer writer(tree, "archive");
  if (writer.size() == 0) throw std::logic_error("an archive without bytes");
}
