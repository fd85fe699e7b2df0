#include "checkpoint/reader.h"

#include "format/torch/torch_file.h"
#include "tessera/error.h"

namespace tessera {
namespace {

[[noreturn]] void refuse(const std::string& what, const Piece& piece, const std::string& name) {
  throw Error(ErrorCode::mismatch, what)
      .at_path(piece.storage->source->name())
      .at_key(name)
      .at_offset(piece.storage->offset);
}

}  // namespace

Piece decoded_piece(const Tensor& tensor, const Piece& piece, const std::string& name) {
  if (!piece.storage) {
    throw Error(ErrorCode::invalid_argument, "this rank does not hold the piece").at_key(name);
  }
  const Storage& storage = *piece.storage;
  if (storage.encoding == Encoding::raw) return piece;
  if (storage.encoding != Encoding::torch_item) {
    throw Error(ErrorCode::unsupported, "items compressed with zstd are not read yet")
        .at_path(storage.source->name())
        .at_key(name);
  }
  Tensor item;
  try {
    item = torch_file::read_tensor_item(slice_source(storage.source, storage.offset, storage.size));
  } catch (Error& error) {
    throw error.at_path(storage.source->name()).at_key(name).at_offset(storage.offset);
  }
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
  Piece raw = item.pieces.at(0);
  raw.slice = piece.slice;
  return raw;
}

}  // namespace tessera
