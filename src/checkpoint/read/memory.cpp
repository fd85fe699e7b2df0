#include "checkpoint/read/memory.h"

#include <algorithm>

#include "base/checked.h"
#include "layout/boxes.h"
#include "layout/strided.h"
#include "tessera/error.h"
#include "value/storage_reader.h"

namespace tessera {
namespace {

[[noreturn]] void refuse(const std::string& what) {
  throw Error(ErrorCode::invalid_argument, what);
}

bool has_negative(const Shape& numbers) {
  return std::any_of(numbers.begin(), numbers.end(), [](std::int64_t n) { return n < 0; });
}

// Bytes that the piece's elements span from the storage's first byte on.
std::uint64_t bytes_reached(const Piece& piece, std::size_t element) {
  const std::int64_t end =
      checked_add(piece.storage_offset, strided_reach(array_of(piece.slice), strides_of(piece)));
  return checked_mul<std::uint64_t>(static_cast<std::uint64_t>(end), element);
}

void require_strides(const Piece& piece) {
  const Shape sizes = array_of(piece.slice);
  if (!piece.strides.empty() && piece.strides.size() != sizes.size())
    refuse("strides " + to_string(piece.strides) + " for a piece of sizes " + to_string(sizes));
  if (has_negative(piece.strides)) refuse("negative strides " + to_string(piece.strides));
}

// What only the memory of a device can be wrong about.
void require_device(const Storage& storage) {
  if (storage.data != nullptr || storage.source)
    refuse("the storage of a piece is on a device and elsewhere, too");
  if (storage.encoding != Encoding::raw)
    refuse("a piece on a device is encoded, expected plain elements");
  if (storage.size > storage.device->size()) {
    refuse("a storage of " + std::to_string(storage.size) + " bytes in " +
           std::to_string(storage.device->size()) + " bytes of " + storage.device->device());
  }
}

// `element`: bytes of one in the storage.
void require_within_storage(const Piece& piece, std::size_t element) {
  if (piece.storage_offset < 0)
    refuse("a piece begins at element " + std::to_string(piece.storage_offset) + " of its storage");
  const std::uint64_t needed = bytes_reached(piece, element);
  if (needed > piece.storage->size) {
    refuse("a piece reaches to byte " + std::to_string(needed) + " of a storage of " +
           std::to_string(piece.storage->size) + " bytes");
  }
}

void require_piece(const Tensor& tensor, const Piece& piece) {
  require_inside(piece.slice, tensor.shape);
  if (numel(piece.slice) == 0 || !piece.storage) return;
  const Storage& storage = *piece.storage;
  if (!is_in_memory(storage) && !storage.source)
    refuse("the storage of a piece has neither memory nor a source");
  if (storage.device) require_device(storage);
  if (storage.encoding != Encoding::raw) return;  // what is in it is proved when it is decoded
  require_strides(piece);
  require_within_storage(piece, size_of(tensor.stored.value_or(tensor.dtype)));
}

void require_pieces(const Tensor& tensor) {
  if (has_negative(tensor.shape)) refuse("negative size in shape " + to_string(tensor.shape));
  for (const Piece& piece : tensor.pieces) require_piece(tensor, piece);
}

void require_elements_apart(const Piece& piece) {
  const Shape sizes = array_of(piece.slice);
  const Shape strides = strides_of(piece);
  for (std::size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] > 1 && strides[d] == 0)
      refuse("a piece to load into has " + std::to_string(sizes[d]) +
             " elements at one place: strides " + to_string(strides));
  }
}

void require_writable_piece(const Piece& piece) {
  if (numel(piece.slice) == 0) return;
  if (!piece.storage || !is_in_memory(*piece.storage)) refuse("a piece to load into has no memory");
  if (piece.storage->encoding != Encoding::raw)
    refuse("a piece to load into is encoded, expected plain elements");
  require_elements_apart(piece);
}

// Runs `proof`; whatever is wrong with a caller's tree is a wrong argument.
template <typename Proof>
void prove(const std::string& key, Proof proof) {
  try {
    proof();
  } catch (const Error& error) {
    throw Error(ErrorCode::invalid_argument, error.message()).at_key(key);
  }
}

}  // namespace

Shape strides_of(const Piece& piece) {
  return piece.strides.empty() ? contiguous_strides(array_of(piece.slice)) : piece.strides;
}

void require_readable(const Tensor& tensor, const std::string& key) {
  prove(key, [&] { require_pieces(tensor); });
}

void require_writable(const Tensor& tensor, const std::string& key) {
  prove(key, [&] {
    require_pieces(tensor);
    for (const Piece& piece : tensor.pieces) require_writable_piece(piece);
  });
}

}  // namespace tessera
