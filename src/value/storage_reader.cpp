#include "value/storage_reader.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <span>
#include <utility>

#include "tessera/error.h"

namespace tessera {
namespace {

// How a type is negated.
enum class Negation : std::uint8_t { sign_bit, complement, none };

constexpr std::array kComplex{DType::complex32, DType::complex64, DType::complex128};
constexpr std::array kReal{DType::float32, DType::float64, DType::float16, DType::bfloat16};
constexpr std::array kIntegers{DType::int64, DType::int32,  DType::int16,  DType::int8,
                               DType::uint8, DType::uint16, DType::uint32, DType::uint64};

bool holds(std::span<const DType> types, DType dtype) {
  return std::ranges::find(types, dtype) != types.end();
}

Negation negation_of(DType dtype) {
  if (holds(kIntegers, dtype)) return Negation::complement;
  return holds(kReal, dtype) || holds(kComplex, dtype) ? Negation::sign_bit : Negation::none;
}

Negation required_negation(DType dtype) {
  const Negation negation = negation_of(dtype);
  if (negation != Negation::none) return negation;
  throw Error(ErrorCode::unsupported,
              "the negative of elements of type " + std::string(to_string(dtype)));
}

bool is_complex(DType dtype) {
  return holds(kComplex, dtype);
}

// Flips the sign of every number of `size` bytes, `step` bytes from one to the next.
void flip_signs(std::byte* first, std::size_t size, std::size_t step, std::int64_t count) {
  std::byte* sign = first + size - 1;  // the last of the little-endian bytes
  for (std::int64_t i = 0; i < count; ++i, sign += step) *sign ^= std::byte{0x80};
}

template <typename Unsigned>
void negate_integers(std::byte* first, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i, first += sizeof(Unsigned)) {
    Unsigned number = 0;
    std::memcpy(&number, first, sizeof number);
    number = static_cast<Unsigned>(Unsigned{0} - number);
    std::memcpy(first, &number, sizeof number);
  }
}

void negate_integers(std::byte* first, std::size_t size, std::int64_t count) {
  switch (size) {
    case 1:
      return negate_integers<std::uint8_t>(first, count);
    case 2:
      return negate_integers<std::uint16_t>(first, count);
    case 4:
      return negate_integers<std::uint32_t>(first, count);
    default:
      return negate_integers<std::uint64_t>(first, count);
  }
}

}  // namespace

void resolve_bits(const Piece& piece, DType dtype, std::byte* elements, std::int64_t count) {
  const bool conj = piece.conj && is_complex(dtype);
  if (!conj && !piece.neg) return;
  const std::size_t size = size_of(dtype);
  const Negation negation = required_negation(dtype);
  if (is_complex(dtype)) {
    const std::size_t part = size / 2;
    if (piece.neg) flip_signs(elements, part, size, count);
    if (piece.neg != conj) flip_signs(elements + part, part, size, count);
  } else if (negation == Negation::sign_bit) {
    flip_signs(elements, size, size, count);
  } else {
    negate_integers(elements, size, count);
  }
}

namespace {

// Bytes of a window for ranges that are packed one behind the other.
constexpr std::size_t kPacked = 1 << 20;

void wait(std::unique_ptr<DeviceCopy>& copy) {
  if (const std::unique_ptr<DeviceCopy> waited = std::exchange(copy, nullptr)) waited->wait();
}

void make_room(DeviceMemory& memory, HostWindow& window, std::size_t size) {
  if (window.bytes.size() >= size) return;
  window = {};  // given back first, so that there are never three
  window = memory.window(size);
}

// Bytes that all ranges have, as far as one window has room for them.
template <typename Range, typename Bytes>
std::size_t room_for(std::span<const Range> ranges, std::size_t done, Bytes Range::*bytes) {
  std::size_t size = 0;
  for (const Range& range : ranges) {
    size += (range.*bytes).size();
    if (size - done >= kPacked) return kPacked;
  }
  return size - done;
}

// Takes parts of `ranges`, of the first one behind its first `done` bytes, until `size` bytes are
// full: calls `take(offset, bytes)` for each. Leaves the rest in `ranges` and `done`.
template <typename Range, typename Bytes, typename Take>
void take_parts(std::span<const Range>& ranges, std::size_t& done, std::size_t size,
                Bytes Range::*bytes, Take take) {
  while (!ranges.empty()) {
    const Bytes rest = (ranges.front().*bytes).subspan(done);
    const Bytes part = rest.first(std::min(rest.size(), size));
    if (!part.empty()) take(ranges.front().offset + done, part);
    size -= part.size();
    if (part.size() < rest.size()) {
      done += part.size();
      return;
    }
    ranges = ranges.subspan(1);
    done = 0;
  }
}

}  // namespace

void DeviceReader::start(Buffer& buffer, std::uint64_t at, std::size_t size) {
  buffer.copy.reset();
  make_room(*memory_, buffer.window, size);
  const ReadRange range{at, buffer.window.bytes.first(size)};
  buffer.copy = memory_->copy_out({&range, 1});
  buffer.at = at;
  buffer.size = size;
}

ByteView DeviceReader::view(std::uint64_t at, std::size_t size) {
  if (size == 0) return {};
  Buffer& buffer = buffers_[next_];
  if (!buffer.copy || buffer.at != at || buffer.size < size) start(buffer, at, size);
  wait(buffer.copy);
  const bool goes_on = at == expected_;
  expected_ = at + size;
  next_ ^= 1;
  if (goes_on && expected_ < end_) {
    start(buffers_[next_], expected_,
          static_cast<std::size_t>(std::min<std::uint64_t>(size, end_ - expected_)));
  }
  return buffer.window.bytes.first(size);
}

void DeviceReader::read(std::uint64_t at, MutableByteView out) {
  while (!out.empty()) {
    const ByteView bytes = view(at, std::min(out.size(), kPacked));
    std::memcpy(out.data(), bytes.data(), bytes.size());
    at += bytes.size();
    out = out.subspan(bytes.size());
  }
}

// Leaves in `ranges` and `done` (bytes of the first of them) what had no room.
void DeviceReader::start_parts(Buffer& buffer, std::span<const ReadRange>& ranges,
                               std::size_t& done) {
  buffer.copy.reset();
  buffer.parts.clear();
  const std::size_t size = room_for(ranges, done, &ReadRange::out);
  make_room(*memory_, buffer.window, size);
  std::vector<ReadRange> copies;
  MutableByteView room = buffer.window.bytes;
  take_parts(ranges, done, size, &ReadRange::out, [&](std::uint64_t at, MutableByteView part) {
    buffer.parts.push_back({at, part});
    copies.push_back({at, room.first(part.size())});
    room = room.subspan(part.size());
  });
  if (!copies.empty()) buffer.copy = memory_->copy_out(copies);
}

void DeviceReader::finish_parts(Buffer& buffer) {
  if (!buffer.copy) return;
  wait(buffer.copy);
  const std::byte* from = buffer.window.bytes.data();
  for (const ReadRange& part : buffer.parts) {
    std::memcpy(part.out.data(), from, part.out.size());
    from += part.out.size();
  }
}

void DeviceReader::read_ranges(std::span<const ReadRange> ranges) {
  for (Buffer& buffer : buffers_) buffer.copy.reset();  // nothing that was copied ahead is used
  std::size_t done = 0;
  std::size_t buffer = 0;
  while (!ranges.empty()) {
    start_parts(buffers_[buffer], ranges, done);
    buffer ^= 1;
    finish_parts(buffers_[buffer]);
  }
  finish_parts(buffers_[buffer ^ 1]);
}

MutableByteView DeviceWriter::room(std::size_t size) {
  Buffer& buffer = buffers_[next_];
  wait(buffer.copy);
  make_room(*memory_, buffer.window, size);
  return buffer.window.bytes.first(size);
}

void DeviceWriter::send(std::uint64_t at, std::size_t size) {
  if (size == 0) return;
  Buffer& buffer = buffers_[next_];
  const WriteRange range{at, ByteView(buffer.window.bytes).first(size)};
  buffer.copy = memory_->copy_in({&range, 1});
  next_ ^= 1;
}

void DeviceWriter::write_ranges(std::span<const WriteRange> ranges) {
  std::size_t done = 0;
  while (!ranges.empty()) {
    const std::size_t size = room_for(ranges, done, &WriteRange::bytes);
    MutableByteView free = room(size);
    std::vector<WriteRange> copies;
    take_parts(ranges, done, size, &WriteRange::bytes, [&](std::uint64_t at, ByteView part) {
      std::memcpy(free.data(), part.data(), part.size());
      copies.push_back({at, free.first(part.size())});
      free = free.subspan(part.size());
    });
    if (copies.empty()) continue;
    buffers_[next_].copy = memory_->copy_in(copies);
    next_ ^= 1;
  }
}

void DeviceWriter::finish() {
  for (Buffer& buffer : buffers_) wait(buffer.copy);
}

bool is_in_memory(const Storage& storage) {
  return storage.data != nullptr || storage.device != nullptr;
}

StorageReader::StorageReader(const Storage& storage, std::uint64_t begin, std::uint64_t end)
    : storage_(storage) {
  if (storage.size > 0 && !is_in_memory(storage) && !storage.source)
    throw Error(ErrorCode::invalid_argument, "a tensor whose bytes are not here");
  if (storage.device) device_.emplace(storage.device, begin, end);
}

void StorageReader::read(std::uint64_t at, MutableByteView out) {
  if (out.empty()) return;
  if (device_) {
    device_->read(at, out);
  } else if (storage_.data != nullptr) {
    std::memcpy(out.data(), storage_.data + at, out.size());
  } else {
    storage_.source->read_at(storage_.offset + at, out);
  }
}

ByteView StorageReader::view(std::uint64_t at, MutableByteView scratch) {
  if (device_) return device_->view(at, scratch.size());
  if (storage_.data != nullptr) return {storage_.data + at, scratch.size()};
  read(at, scratch);
  return scratch;
}

}  // namespace tessera
