// Writes numpy's .npy files (format version 1.0): a header, then the elements in row-major order.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "tessera/layout.h"
#include "tessera/storage.h"

#pragma GCC visibility push(default)  // the command links it, see cmake/TesseraShared.cmake
namespace tessera {

class NpyWriter {
 public:
  // A new file; one that is there already is `already_exists`. bfloat16 becomes float32; types that
  // numpy lacks become unsigned integers of their size.
  NpyWriter(const std::string& path, DType dtype, const Shape& shape);
  // The next elements, of the dtype that was given.
  void add(ByteView bytes);
  void commit() { sink_->commit(); }

 private:
  DType dtype_;
  std::unique_ptr<ByteSink> sink_;
  std::uint64_t at_ = 0;  // where the next elements go
};

}  // namespace tessera
#pragma GCC visibility pop
