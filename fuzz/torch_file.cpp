#include "format/torch/torch_file.h"
#include "format/torch/modules.h"
#include "target.h"

void tessera::fuzz::parse(ByteView input) {
  const auto source = memory_source({input.begin(), input.end()}, "input");
  Value tree = torch_file::read(source);
  (void)torch_file::replace_modules(tree);
  (void)torch_file::read_tensor_item(source);
}
