#include "checkpoint/load/spoil.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <exception>

#include "checkpoint/read/memory.h"
#include "layout/boxes.h"
#include "layout/strided.h"
#include "tessera/device_memory.h"
#include "tessera/dtype.h"
#include "tessera/leaf.h"
#include "tessera/restore.h"
#include "value/device_windows.h"

namespace tessera {
namespace {

constexpr std::size_t kWindow = 64 << 10;     // bytes, a multiple of every element's
constexpr std::size_t kMostWrites = 1 << 10;  // for a device at once

enum class Filler : std::uint8_t { ones, top_bit, one };

// All bits set are a NaN in every type that has one, except in those whose only NaN is what would
// be a negative zero.
Filler filler_of(DType dtype) {
  switch (dtype) {
    case DType::int64:
    case DType::int32:
    case DType::int16:
    case DType::int8:
    case DType::float8_e4m3fnuz:
    case DType::float8_e5m2fnuz:
      return Filler::top_bit;
    case DType::bool8:
      return Filler::one;
    default:
      return Filler::ones;
  }
}

using Window = std::array<std::byte, kWindow>;

// Elements without a value.
void blank(DType dtype, Window& window) {
  const Filler filler = filler_of(dtype);
  window.fill(filler == Filler::ones ? std::byte{0xFF} : std::byte{0});
  if (filler == Filler::ones) return;
  const std::size_t element = size_of(dtype);
  for (std::size_t last = element - 1; last < window.size(); last += element)
    window[last] = filler == Filler::one ? std::byte{1} : std::byte{0x80};
}

// Calls `write(byte, size)` for windows of the piece's bytes, by their place in its storage.
template <typename Write>
void each_part(const Tensor& tensor, const Piece& piece, const Write& write) {
  const std::size_t element = size_of(tensor.dtype);
  const auto visit = [&](std::int64_t position, std::int64_t count) {
    auto at = static_cast<std::size_t>(piece.storage_offset + position) * element;
    const std::size_t end = at + static_cast<std::size_t>(count) * element;
    for (; at < end; at += kWindow) write(at, std::min(kWindow, end - at));
  };
  const Shape sizes = array_of(piece.slice);
  for_each_strided_run(sizes, strides_of(piece), 0, numel(sizes), visit);
}

void spoil_device(const Tensor& tensor, const Piece& piece, const Window& window) {
  DeviceWriter writer(piece.storage->device);
  std::vector<WriteRange> writes;
  const auto write = [&] {
    writer.write_ranges(writes);
    writes.clear();
  };
  each_part(tensor, piece, [&](std::size_t at, std::size_t size) {
    writes.push_back({at, {window.data(), size}});
    if (writes.size() == kMostWrites) write();
  });
  write();
  writer.finish();
}

void spoil(const Tensor& tensor, Window& window) {
  blank(tensor.dtype, window);
  for (const Piece& piece : tensor.pieces) {
    if (!piece.storage || numel(piece.slice) == 0) continue;
    if (piece.storage->device) {
      spoil_device(tensor, piece, window);
      continue;
    }
    each_part(tensor, piece, [&](std::size_t at, std::size_t size) {
      std::memcpy(piece.storage->data + at, window.data(), size);
    });
  }
}

// Goes on behind a tensor that cannot be overwritten, and then says so.
class Spoiler {
 public:
  void add(const Value& tensor) {
    try {
      spoil(tensor.as_tensor(), window_);
    } catch (const std::exception& error) {
      if (failed_.empty()) failed_ = error.what();
    }
  }

  [[nodiscard]] Error told(const Error& failure) const {
    Error all = failure;
    all.while_doing(failed_.empty() ? "after which all that it was to fill is NaN or, of integers, "
                                      "an extreme"
                                    : "after which what it was to fill is undefined, and cannot "
                                      "be overwritten: " +
                                          failed_);
    return all;
  }

 private:
  Window window_ = {};
  std::string failed_;
};

}  // namespace

Error spoiled(const std::vector<Filling>& fillings, const Error& failure) {
  Spoiler spoiler;
  for (const Filling& filling : fillings) spoiler.add(filling.wanted);
  return spoiler.told(failure);
}

Error spoiled(const Value& tree, const Error& failure) {
  Spoiler spoiler;
  for (const Leaf& leaf : leaves_of(tree)) {
    if (leaf.value.is(Value::Kind::tensor)) spoiler.add(leaf.value);
  }
  return spoiler.told(failure);
}

}  // namespace tessera
