// Whatever can be read can be written, and reads back as the same value.
#include <stdexcept>

#include "format/pickle/pickle.h"
#include "format/pickle/scan.h"
#include "target.h"

void tessera::fuzz::parse(ByteView input) {
  pickle::ReadOptions options;
  options.max_nodes = 100'000;
  const Value value = pickle::read(input, options).value;
  (void)pickle::globals(input);
  pickle::WriteOptions write_options;
  write_options.protocol = 4;
  const auto written = pickle::write(value, write_options);
  if (pickle::write(pickle::read(written, options).value, write_options) != written) {
    throw std::logic_error("what was written reads back as something else");
  }
}
