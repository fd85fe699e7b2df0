// Writes numpy's .npy files (format version 1.0): a header, then the elements in row-major order.
#pragma once

#include <functional>
#include <string>

#include "tessera/layout.h"
#include "tessera/storage.h"

#pragma GCC visibility push(default)  // the command links it, see cmake/TesseraShared.cmake
namespace tessera {

// Writes one array. bfloat16 becomes float32; types that numpy lacks become unsigned integers of
// their size.
class NpyWriter {
 public:
  // Gets the bytes of the file one after the other.
  using Write = std::function<void(ByteView)>;
  NpyWriter(Write write, DType dtype, const Shape& shape);
  // The next elements, of the dtype that was given.
  void add(ByteView bytes);

 private:
  Write write_;
  DType dtype_;
};

}  // namespace tessera
#pragma GCC visibility pop
