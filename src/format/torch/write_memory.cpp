#include <algorithm>
#include <iterator>

#include "base/crc32.h"
#include "format/torch/torch_file.h"
#include "layout/plan.h"
#include "layout/strided.h"
#include "tessera/error.h"
#include "value/lazy_bits.h"
#include "value/storage_reader.h"

namespace tessera::torch_file {
namespace {

void read(const Storage& storage, std::uint64_t offset, MutableByteView out) {
  if (out.empty()) return;
  StorageReader(storage, offset, offset + out.size()).read(offset, out);
}

const Slice& plain_slice(const Piece& piece) {
  if (!piece.storage || piece.storage->encoding != Encoding::raw) {
    throw Error(ErrorCode::invalid_argument,
                "a tensor with a piece that is not plain elements here");
  }
  return piece.slice;
}

// The sizes of the array that a piece is.
Shape array_of(const Slice& slice) {
  const Box* box = std::get_if<Box>(&slice);
  return box != nullptr ? box->sizes : Shape{numel(slice)};
}

// The tensor's elements, row-major, from all of its pieces.
void gather(const Tensor& tensor, MutableByteView out) {
  const auto size = static_cast<std::int64_t>(size_of(tensor.dtype));
  std::vector<Slice> from;
  std::ranges::transform(tensor.pieces, std::back_inserter(from), plain_slice);
  const std::vector<Slice> to = {whole(tensor.shape)};
  const std::vector<Copy> plan = plan_copies(tensor.shape, from, to);
  require_filled(tensor.shape, to, plan);
  for (const Copy& copy : plan) {
    const Piece& piece = tensor.pieces[copy.from];
    const Shape sizes = array_of(piece.slice);
    const Shape strides = piece.strides.empty() ? contiguous_strides(sizes) : piece.strides;
    std::int64_t to_element = copy.to_local;
    for_each_strided_run(
        sizes, strides, copy.from_local, copy.count,
        [&](std::int64_t position, std::int64_t count) {
          const auto target = out.subspan(static_cast<std::size_t>(to_element * size),
                                          static_cast<std::size_t>(count * size));
          read(*piece.storage, static_cast<std::uint64_t>((piece.storage_offset + position) * size),
               target);
          resolve_bits(piece, tensor.dtype, target.data(), count);
          to_element += count;
        });
  }
}

}  // namespace

std::vector<std::byte> write(const Value& tree, const std::string& root) {
  Writer writer(tree, root);
  std::vector<std::byte> bytes(writer.size());
  const auto place = [&](std::uint64_t offset, ByteView part) {
    std::copy(part.begin(), part.end(), bytes.begin() + static_cast<std::ptrdiff_t>(offset));
  };
  for (const Writer::Segment& segment : writer.fixed()) place(segment.offset, segment.bytes);
  std::vector<std::uint32_t> crcs;
  for (const Writer::Slot& slot : writer.slots()) {
    const MutableByteView out = MutableByteView(bytes).subspan(slot.offset, slot.size);
    if (slot.storage) {
      read(*slot.storage, 0, out);
    } else {
      gather(*slot.tensor, out);
    }
    crcs.push_back(crc32(out));
  }
  writer.finish(crcs, place);
  return bytes;
}

}  // namespace tessera::torch_file
