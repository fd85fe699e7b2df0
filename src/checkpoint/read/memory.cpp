#include "checkpoint/read/memory.h"

#include <algorithm>

#include "base/numbers.h"
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

struct Dimension {
  std::int64_t stride, size;
};

// Strides that are longer than everything within one of their steps keep all elements apart.
bool are_nested(const std::vector<Dimension>& dimensions) {
  std::int64_t reach = 0;  // of the dimensions with shorter strides
  for (const Dimension& dimension : dimensions) {
    if (dimension.stride <= reach) return false;
    reach += (dimension.size - 1) * dimension.stride;
  }
  return true;
}

bool are_all_apart(const std::vector<Dimension>& dimensions) {
  std::vector<std::int64_t> places{0};
  for (const Dimension& dimension : dimensions) {
    const std::size_t before = places.size();
    for (std::int64_t step = 1; step < dimension.size; ++step) {
      for (std::size_t i = 0; i < before; ++i)
        places.push_back(places[i] + step * dimension.stride);
    }
  }
  std::ranges::sort(places);
  return std::ranges::adjacent_find(places) == places.end();
}

// Strange strides are refused where looking at every element would take long.
void require_elements_apart(const Piece& piece) {
  constexpr std::int64_t kFew = 1 << 20;
  const Shape sizes = array_of(piece.slice);
  const Shape strides = strides_of(piece);
  std::vector<Dimension> dimensions;
  for (std::size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] > 1) dimensions.push_back({strides[d], sizes[d]});
  }
  std::ranges::sort(dimensions, {}, &Dimension::stride);
  if (are_nested(dimensions)) return;
  if (numel(piece.slice) <= kFew && are_all_apart(dimensions)) return;
  refuse("a piece to load into has several elements at one place: sizes " + to_string(sizes) +
         ", strides " + to_string(strides));
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
