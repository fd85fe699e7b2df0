// Writes DCP items (F-03b) one after another into a data file.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "format/dcp/dcp.h"
#include "tessera/io.h"
#include "tessera/value.h"

namespace tessera {

// Gives the elements [begin, begin + count) of the tensor that is being written, in row-major
// order; `scratch` may be used to hold them. The view is read before the next call.
using ElementSource =
    std::function<ByteView(std::int64_t begin, std::int64_t count, MutableByteView scratch)>;

// Writes the elements of the tensor that is being written at `at` of `sink`, and returns the CRC-32
// of their bytes.
using ElementWriter = std::function<std::uint32_t(ByteSink& sink, std::uint64_t at)>;

class ItemWriter {
 public:
  // `window`: bytes per step.
  ItemWriter(ByteSink& sink, std::string path, std::size_t window)
      : sink_(sink), path_(std::move(path)), window_(window) {}

  // A torch.save archive of one tensor of this dtype and shape.
  dcp::Item tensor(DType dtype, const Shape& shape, bool requires_grad,
                   const ElementSource& elements);
  dcp::Item tensor(DType dtype, const Shape& shape, bool requires_grad,
                   const ElementWriter& elements);
  // A torch.save archive of a value without tensors outside memory.
  dcp::Item value(const Value& value);
  [[nodiscard]] std::uint64_t written() const noexcept { return offset_; }

 private:
  ByteSink& sink_;
  std::string path_;          // of the data file, as .metadata names it
  std::uint64_t offset_ = 0;  // where the next item begins
  std::size_t window_;
  std::vector<std::byte> scratch_;
};

// Writes the storages' bytes of one slot of an archive at `base`, window by window, and returns
// their CRC-32.
std::uint32_t write_elements(ByteSink& sink, std::uint64_t at, std::int64_t count,
                             std::size_t element, const ElementSource& elements,
                             MutableByteView scratch);

}  // namespace tessera
