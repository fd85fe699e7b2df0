#include "checkpoint/read/same_elements.h"

#include <algorithm>
#include <cstddef>
#include <vector>

#include "checkpoint/read/reader.h"

namespace tessera {
namespace {

// Whether both are the same views of whole storages with one checksum. 0: the file has none.
bool same_checksum(const Piece& a, const Piece& b) {
  const Storage& x = *a.storage;
  const Storage& y = *b.storage;
  return x.size == y.size && a.storage_offset == b.storage_offset && a.strides == b.strides &&
         x.crc32.value_or(0) != 0 && x.crc32 == y.crc32;
}

bool same_bytes(const Tensor& a, const Tensor& b, const std::string& name) {
  constexpr std::int64_t kWindow = 64 << 10;  // elements
  const std::size_t size = size_of(a.dtype);
  const Slice all = whole(a.shape);
  TensorReader left(a, name);
  TensorReader right(b, name);
  std::vector<std::byte> bytes[2];
  for (std::int64_t at = 0; at < numel(a.shape); at += kWindow) {
    const std::int64_t count = std::min(kWindow, numel(a.shape) - at);
    for (auto& half : bytes) half.resize(static_cast<std::size_t>(count) * size);
    left.read(all, at, count, bytes[0].data());
    right.read(all, at, count, bytes[1].data());
    if (bytes[0] != bytes[1]) return false;
  }
  return true;
}

}  // namespace

bool same_form(const Tensor& a, const Tensor& b) {
  return a.shape == b.shape && a.dtype == b.dtype;
}

bool same_elements(const Tensor& a, const Tensor& b, const std::string& name) {
  if (!same_form(a, b)) return false;
  return same_checksum(a.pieces.at(0), b.pieces.at(0)) || same_bytes(a, b, name);
}

}  // namespace tessera
