#include "value/device_windows.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace tessera {
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

void DeviceReader::start(Slot& slot, std::uint64_t at, std::size_t size) {
  slot.copy.reset();
  make_room(*memory_, slot.window, size);
  const ReadRange range{at, slot.window.bytes.first(size)};
  slot.copy = memory_->copy_out({&range, 1});
  slot.at = at;
  slot.size = size;
}

ByteView DeviceReader::view(std::uint64_t at, std::size_t size) {
  if (size == 0) return {};
  Slot& slot = slots_[next_];
  if (!slot.copy || slot.at != at || slot.size < size) start(slot, at, size);
  wait(slot.copy);
  const bool goes_on = at == expected_;
  expected_ = at + size;
  next_ ^= 1;
  if (goes_on && expected_ < end_) {
    start(slots_[next_], expected_,
          static_cast<std::size_t>(std::min<std::uint64_t>(size, end_ - expected_)));
  }
  return slot.window.bytes.first(size);
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
void DeviceReader::start_parts(Slot& slot, std::span<const ReadRange>& ranges, std::size_t& done) {
  slot.copy.reset();
  slot.parts.clear();
  const std::size_t size = room_for(ranges, done, &ReadRange::out);
  make_room(*memory_, slot.window, size);
  std::vector<ReadRange> copies;
  MutableByteView room = slot.window.bytes;
  take_parts(ranges, done, size, &ReadRange::out, [&](std::uint64_t at, MutableByteView part) {
    slot.parts.push_back({at, part});
    copies.push_back({at, room.first(part.size())});
    room = room.subspan(part.size());
  });
  if (!copies.empty()) slot.copy = memory_->copy_out(copies);
}

void DeviceReader::finish_parts(Slot& slot) {
  if (!slot.copy) return;
  wait(slot.copy);
  const std::byte* from = slot.window.bytes.data();
  for (const ReadRange& part : slot.parts) {
    std::memcpy(part.out.data(), from, part.out.size());
    from += part.out.size();
  }
}

void DeviceReader::read_ranges(std::span<const ReadRange> ranges) {
  for (Slot& slot : slots_) slot.copy.reset();  // nothing that was copied ahead is used
  std::size_t done = 0;
  std::size_t slot = 0;
  while (!ranges.empty()) {
    start_parts(slots_[slot], ranges, done);
    slot ^= 1;
    finish_parts(slots_[slot]);
  }
  finish_parts(slots_[slot ^ 1]);
}

MutableByteView DeviceWriter::room(std::size_t size) {
  Slot& slot = slots_[next_];
  wait(slot.copy);
  make_room(*memory_, slot.window, size);
  return slot.window.bytes.first(size);
}

void DeviceWriter::send(std::uint64_t at, std::size_t size) {
  if (size == 0) return;
  Slot& slot = slots_[next_];
  const WriteRange range{at, ByteView(slot.window.bytes).first(size)};
  slot.copy = memory_->copy_in({&range, 1});
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
    slots_[next_].copy = memory_->copy_in(copies);
    next_ ^= 1;
  }
}

void DeviceWriter::finish() {
  for (Slot& slot : slots_) wait(slot.copy);
}

}  // namespace tessera
