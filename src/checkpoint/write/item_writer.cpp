#include "checkpoint/write/item_writer.h"

#include <algorithm>

#include "base/crc32.h"
#include "format/torch/torch_file.h"
#include "tessera/error.h"

namespace tessera {

std::uint32_t write_elements(ByteSink& sink, std::uint64_t at, std::int64_t count,
                             std::size_t element, const ElementSource& elements,
                             MutableByteView scratch) {
  const auto step = static_cast<std::int64_t>(std::max<std::size_t>(scratch.size() / element, 1));
  std::uint32_t crc = 0;
  for (std::int64_t begin = 0; begin < count; begin += step) {
    const ByteView bytes = elements(begin, std::min(step, count - begin), scratch);
    crc = crc32(bytes, crc);
    sink.write_at(at, bytes);
    at += bytes.size();
  }
  return crc;
}

dcp::Item ItemWriter::tensor(DType dtype, const Shape& shape, bool requires_grad,
                             const ElementSource& elements) {
  scratch_.resize(window_);
  return tensor(dtype, shape, requires_grad, [&](ByteSink& sink, std::uint64_t at) {
    return write_elements(sink, at, numel(shape), size_of(dtype), elements, scratch_);
  });
}

dcp::Item ItemWriter::tensor(DType dtype, const Shape& shape, bool requires_grad,
                             const ElementWriter& elements) {
  Tensor tensor;
  tensor.dtype = dtype;
  tensor.shape = shape;
  tensor.requires_grad = requires_grad;
  const Value tree{Tensor(tensor)};
  torch_file::Writer archive(tree, "archive");
  for (const auto& segment : archive.fixed())
    sink_.write_at(offset_ + segment.offset, segment.bytes);
  std::vector<std::uint32_t> crcs;
  for (const auto& slot : archive.slots()) crcs.push_back(elements(sink_, offset_ + slot.offset));
  for (const auto& segment : archive.finish(crcs))
    sink_.write_at(offset_ + segment.offset, segment.bytes);
  dcp::Item item{path_, offset_, archive.size(), {}};
  offset_ += archive.size();
  return item;
}

dcp::Item ItemWriter::value(const Value& value) {
  const std::vector<std::byte> bytes = torch_file::write(value, "archive");
  sink_.write_at(offset_, bytes);
  dcp::Item item{path_, offset_, bytes.size(), {}};
  offset_ += bytes.size();
  return item;
}

}  // namespace tessera
