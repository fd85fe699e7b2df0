#include "checkpoint/save/elements.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "base/digest.h"
#include "base/stop.h"
#include "checkpoint/save/copies.h"
#include "value/storage_reader.h"

namespace tessera {
namespace {

constexpr std::size_t kWindow = 1 << 20;  // bytes

// Whether the piece's elements lie in the memory of the host or of a device one after the other, as
// they are meant.
bool is_plain(const Tensor& tensor, const Piece& piece, const Shape& sizes) {
  if (!piece.storage || tensor.stored) return false;  // no elements, then, or of another type
  const bool dense = piece.strides.empty() || piece.strides == contiguous_strides(sizes);
  return dense && !piece.conj && !piece.neg && is_in_memory(*piece.storage);
}

std::uint64_t sample_on_device(const Piece& piece, std::size_t element, std::int64_t count) {
  std::vector<std::byte> bytes;
  std::vector<ReadRange> ranges;
  const std::vector<FlatRange> windows = sampled(count, element);
  for (const FlatRange& window : windows)
    bytes.resize(bytes.size() + static_cast<std::size_t>(window.end - window.begin) * element);
  MutableByteView rest = bytes;
  for (const FlatRange& window : windows) {
    const auto size = static_cast<std::size_t>(window.end - window.begin) * element;
    ranges.push_back({static_cast<std::uint64_t>(piece.storage_offset + window.begin) * element,
                      rest.first(size)});
    rest = rest.subspan(size);
  }
  DeviceReader(piece.storage->device, 0, 0).read_ranges(ranges);
  return sample_of([next = ranges.begin()](std::int64_t, std::int64_t,
                                           MutableByteView) mutable { return (next++)->out; },
                   count, element);
}

}  // namespace

ElementSource elements_of(const Tensor& tensor, const HeldChunk& chunk, TensorReader& reader) {
  if (numel(chunk.box) == 0)
    return [](std::int64_t, std::int64_t, MutableByteView) { return ByteView(); };
  const Piece& piece = tensor.pieces[chunk.piece];
  const std::size_t element = size_of(tensor.dtype);
  if (is_plain(tensor, piece, chunk.box.sizes)) {
    const std::uint64_t first = static_cast<std::uint64_t>(piece.storage_offset) * element;
    const std::uint64_t size = byte_size(tensor.dtype, chunk.box.sizes);
    auto bytes = std::make_shared<StorageReader>(*piece.storage, first, first + size);
    return [bytes = std::move(bytes), first, element](std::int64_t begin, std::int64_t count,
                                                      MutableByteView scratch) {
      return bytes->view(first + static_cast<std::uint64_t>(begin) * element,
                         scratch.first(static_cast<std::size_t>(count) * element));
    };
  }
  return
      [&reader, &chunk, element](std::int64_t begin, std::int64_t count, MutableByteView scratch) {
        reader.read(chunk.box, begin, count, scratch.data());
        return ByteView(scratch).first(static_cast<std::size_t>(count) * element);
      };
}

std::uint64_t sample_of_chunk(const Tensor& tensor, const std::string& name,
                              const HeldChunk& chunk) {
  const std::int64_t count = numel(chunk.box);
  const std::size_t element = size_of(tensor.dtype);
  if (count == 0) return 0;
  const Piece& piece = tensor.pieces[chunk.piece];
  if (is_plain(tensor, piece, chunk.box.sizes) && piece.storage->device)
    return sample_on_device(piece, element, count);
  TensorReader reader(tensor, name);
  return sample_of(elements_of(tensor, chunk, reader), count, element);
}

std::uint64_t digest_of_chunk(const Tensor& tensor, const std::string& name, const HeldChunk& chunk,
                              const std::stop_token& stop) {
  const std::int64_t count = numel(chunk.box);
  const std::size_t element = size_of(tensor.dtype);
  const auto step = std::min<std::int64_t>(count, kWindow / element);
  std::vector<std::byte> scratch(static_cast<std::size_t>(step) * element);
  TensorReader reader(tensor, name);
  const ElementSource elements = elements_of(tensor, chunk, reader);
  RunningDigest digest;
  for (std::int64_t begin = 0; begin < count; begin += step) {
    require_going_on(stop);
    digest.add(elements(begin, std::min(step, count - begin), MutableByteView(scratch)));
  }
  return digest.value();
}

}  // namespace tessera
