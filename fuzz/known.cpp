// Whatever objects of a pickle mean can be told, and an array has the bytes of its elements.
#include <stdexcept>

#include "format/pickle/pickle.h"
#include "target.h"
#include "tessera/numpy_array.h"
#include "value/meaning.h"
#include "value/render.h"

void tessera::fuzz::parse(ByteView input) {
  pickle::ReadOptions options;
  options.max_nodes = 100'000;
  const Value value = pickle::read(input, options).value;
  (void)render(value, 100'000);
  (void)meaning_of(value);
  if (!value.is(Value::Kind::list)) return;
  for (const Value& item : value.items()) {
    const auto array = numpy_array(item);
    if (!array) continue;
    const Storage& storage = *array->tensor.pieces.front().storage;
    if (storage.size != byte_size(array->tensor.dtype, array->tensor.shape))
      throw std::logic_error("an array has other bytes than its elements");
  }
}
