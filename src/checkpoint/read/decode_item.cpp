#include "checkpoint/read/decode_item.h"

#include <array>

#include "base/checked.h"
#include "checkpoint/read/reader.h"
#include "checkpoint/read/zstd_source.h"
#include "format/torch/torch_file.h"
#include "tessera/error.h"
#include "value/storage_reader.h"

namespace tessera {
namespace {

// An archive of a chunk is its elements, a pickle and little more, unless the chunk's storage is a
// view's.
constexpr std::uint64_t kArchiveRoom = 16 << 20;

[[noreturn]] void refuse(const std::string& what, const Piece& piece, const std::string& name) {
  throw Error(ErrorCode::corrupt, what)
      .at_path(piece.storage->source->name())
      .at_key(name)
      .at_offset(piece.storage->offset);
}

// An item is a zip and nothing else, not even an older stream of torch.save.
void require_zip(const ByteSource& source) {
  std::array<std::byte, 2> start{};
  if (source.size() >= start.size()) source.read_at(0, start);
  if (start == std::array{std::byte{'P'}, std::byte{'K'}}) return;
  throw Error(ErrorCode::corrupt, "the item is not a torch.save archive").at_offset(0);
}

}  // namespace

std::uint64_t most_in_item(const Tensor& tensor, const Piece& piece) {
  const auto count = narrow<std::uint64_t>(numel(piece.slice));
  const auto size = checked_mul<std::uint64_t>(count, size_of(tensor.dtype));
  return checked_add(size, kArchiveRoom);
}

void require_item(const Tensor& tensor, const Piece& piece, const Tensor& item,
                  const std::string& name) {
  const Shape& expected = std::get<Box>(piece.slice).sizes;
  if (item.shape != expected) {
    refuse("the item holds a tensor of shape " + to_string(item.shape) + ", .metadata says " +
               to_string(expected),
           piece, name);
  }
  const DType stored = tensor.stored.value_or(tensor.dtype);
  if (item.dtype != stored) {
    refuse("the item holds " + std::string(to_string(item.dtype)) + ", .metadata says " +
               std::string(to_string(stored)),
           piece, name);
  }
}

Piece decoded_piece(const Tensor& tensor, const Piece& piece, const std::string& name) {
  if (!piece.storage) {
    throw Error(ErrorCode::invalid_argument, "this rank does not hold the piece").at_key(name);
  }
  const Storage& storage = *piece.storage;
  if (!is_in_memory(storage) && !storage.source) {
    throw Error(ErrorCode::invalid_argument, "the piece has neither memory nor a source")
        .at_key(name);
  }
  if (storage.encoding == Encoding::raw) return piece;
  Tensor item;
  try {
    std::shared_ptr<const ByteSource> bytes =
        slice_source(storage.source, storage.offset, storage.size);
    if (storage.encoding == Encoding::torch_item_zstd) {
      bytes = zstd_source(std::move(bytes), most_in_item(tensor, piece));
    }
    require_zip(*bytes);
    item = torch_file::read_tensor_item(std::move(bytes));
  } catch (Error& error) {
    throw error.at_path(storage.source->name()).at_key(name).at_offset(storage.offset);
  }
  require_item(tensor, piece, item, name);
  Piece raw = item.pieces.at(0);
  raw.slice = piece.slice;
  return raw;
}

}  // namespace tessera
