#include "checkpoint/dcp/item_writer.h"

#include <algorithm>

#include "base/crc32.h"
#include "checkpoint/read/reader.h"
#include "checkpoint/read/storage_checks.h"
#include "value/storage_reader.h"

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

std::uint32_t write_storage(ByteSink& sink, std::uint64_t at, const Storage& storage,
                            MutableByteView scratch,
                            const std::function<void(std::size_t)>& progress) {
  StorageReader reader(storage);
  const std::uint32_t crc = write_elements(
      sink, at, static_cast<std::int64_t>(storage.size), 1,
      [&](std::int64_t begin, std::int64_t count, MutableByteView buffer) {
        const ByteView bytes = reader.view(static_cast<std::uint64_t>(begin),
                                           buffer.first(static_cast<std::size_t>(count)));
        if (progress) progress(bytes.size());
        return bytes;
      },
      scratch);
  if (has_crc(storage)) require_crc(storage, crc, "");
  return crc;
}

dcp::Item ItemWriter::tensor(DType dtype, const Shape& shape, const ElementSource& elements) {
  scratch_.resize(window_);
  return tensor(dtype, shape, [&](ByteSink& sink, std::uint64_t at) {
    return write_elements(sink, at, numel(shape), size_of(dtype), elements, scratch_);
  });
}

dcp::Item ItemWriter::tensor(DType dtype, const Shape& shape, const ElementWriter& elements) {
  Tensor tensor;
  tensor.dtype = dtype;
  tensor.shape = shape;
  return archive(Value(std::move(tensor)),
                 [&](const auto& slot) { return elements(sink_, offset_ + slot.offset); });
}

dcp::Item ItemWriter::value(const Value& value) {
  return archive(value, [&](const torch_file::Writer::Slot& slot) {
    scratch_.resize(window_);
    const std::uint64_t at = offset_ + slot.offset;
    if (slot.storage) return write_storage(sink_, at, *slot.storage, scratch_);
    const Tensor& tensor = *slot.tensor;
    TensorReader reader(tensor, "");
    const std::size_t element = size_of(tensor.dtype);
    return write_elements(
        sink_, at, numel(tensor.shape), element,
        [&](std::int64_t begin, std::int64_t count, MutableByteView buffer) {
          reader.read(whole(tensor.shape), begin, count, buffer.data());
          return ByteView(buffer).first(static_cast<std::size_t>(count) * element);
        },
        scratch_);
  });
}

dcp::Item ItemWriter::archive(const Value& tree, const SlotWriter& write_slot) {
  torch_file::Writer archive(tree, "archive");
  for (const auto& segment : archive.fixed())
    sink_.write_at(offset_ + segment.offset, segment.bytes);
  std::vector<std::uint32_t> crcs;
  for (const auto& slot : archive.slots()) crcs.push_back(write_slot(slot));
  archive.finish(crcs, [this](std::uint64_t offset, ByteView bytes) {
    sink_.write_at(offset_ + offset, bytes);
  });
  dcp::Item item{path_, offset_, archive.size(), {}};
  offset_ += archive.size();
  return item;
}

}  // namespace tessera
