// Elements of the source's tensors on their way into a file.
#include "checkpoint/dcp/item_writer.h"
#include "checkpoint/write/resume.h"
#include "checkpoint/write/targets.h"

namespace tessera {

std::uint32_t write_unit(const ConvertJob& job, ByteSink& sink, const FileUnit& unit,
                         const UnitMaker& make) {
  const bool follow = job.resumption != nullptr && unit.resumable && unit.size > 0;
  return follow ? job.resumption->write(job, sink, unit, make) : make(sink).crc;
}

bool is_resumable(const ConvertJob& job, const Tensor& tensor, const Slice& slice) {
  return !job.options.dequantize || numel(slice) == numel(tensor.shape);
}

std::uint32_t stream_slice(const ConvertJob& job, const std::string& name, const Tensor& tensor,
                           const Slice& slice, ByteSink& sink, std::uint64_t at) {
  const std::int64_t elements = numel(slice);
  const std::size_t element = size_of(tensor.dtype);
  const std::uint64_t size = static_cast<std::uint64_t>(elements) * element;
  const FileUnit unit{at, size, name + " " + to_string(slice), is_resumable(job, tensor, slice)};
  return write_unit(job, sink, unit, [&](ByteSink& out) -> MadeUnit {
    TensorReader reader(tensor, name, job.tile);
    std::vector<std::byte> scratch = job.buffer_for(size);
    const std::uint32_t crc = write_elements(
        out, at, elements, element,
        [&](std::int64_t begin, std::int64_t count, MutableByteView buffer) {
          reader.read(slice, begin, count, buffer.data());
          const std::size_t bytes = static_cast<std::size_t>(count) * element;
          job.meter.add(bytes);
          return ByteView(buffer).first(bytes);
        },
        scratch);
    std::vector<HandedOver> open = reader.hand_over(job.checks);
    job.counters.add(reader.report());
    return {crc, std::move(open)};
  });
}

std::uint32_t stream_tensor(const ConvertJob& job, const std::string& name, const Tensor& tensor,
                            ByteSink& sink, std::uint64_t at) {
  return stream_slice(job, name, tensor, whole(tensor.shape), sink, at);
}

}  // namespace tessera
