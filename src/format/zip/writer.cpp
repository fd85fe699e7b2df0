#include <algorithm>
#include <utility>

#include "base/numbers.h"
#include "format/zip/zip.h"
#include "tessera/error.h"

namespace tessera::zip {
namespace {

constexpr std::uint64_t kMaxAlignment = 32768;
constexpr std::uint16_t kPadding = 0x4246;  // "FB", the id of PyTorch's padding field

void append(std::vector<std::byte>& to, std::string_view text) {
  const auto* bytes = reinterpret_cast<const std::byte*>(text.data());
  to.insert(to.end(), bytes, bytes + text.size());
}

bool large(std::uint64_t value) {
  return value >= kIn64;
}

// Whether an entry's numbers need the 64-bit field.
bool is_wide(std::uint64_t size, std::uint64_t offset) {
  return large(size) || large(offset);
}

std::uint32_t low(std::uint64_t value) {
  return large(value) ? kIn64 : static_cast<std::uint32_t>(value);
}

// An entry without data has no descriptor and does not announce one.
std::uint16_t flags_of(std::uint64_t size) {
  return size == 0 ? kFlagUtf8 : static_cast<std::uint16_t>(kFlagUtf8 | kFlagDescriptor);
}

std::uint64_t zip64_field_size(std::uint64_t size, std::uint64_t offset) {
  if (!is_wide(size, offset)) return 0;
  return 4U + (large(size) ? 16U : 0U) + (large(offset) ? 8U : 0U);
}

// The 64-bit field: both sizes when the size needs it, then the offset when that does. Empty: not
// needed.
std::vector<std::byte> zip64_field(std::uint64_t size, std::uint64_t stored_size,
                                   std::uint64_t offset) {
  std::vector<std::byte> field;
  if (!is_wide(size, offset)) return field;
  append_le(field, kZip64Field);
  append_le(field, static_cast<std::uint16_t>(zip64_field_size(size, offset) - 4));
  if (large(size)) {
    append_le(field, size);
    append_le(field, stored_size);
  }
  if (large(offset)) append_le(field, offset);
  return field;
}

std::uint64_t descriptor_size(std::uint64_t size, std::uint64_t offset) {
  if (size == 0) return 0;
  return is_wide(size, offset) ? kDescriptor64Size : kDescriptorSize;
}

}  // namespace

Writer::Writer(std::uint64_t alignment) : alignment_(alignment) {
  if (alignment == 0 || alignment > kMaxAlignment) {
    throw Error(ErrorCode::invalid_argument, "zip alignment " + std::to_string(alignment) +
                                                 ", expected 1 to " +
                                                 std::to_string(kMaxAlignment));
  }
}

Writer::Placed Writer::add(std::string_view name, std::uint64_t size) {
  if (name.empty() || name.size() > 0xFFFF) {
    throw Error(ErrorCode::invalid_argument,
                "zip entry name of " + std::to_string(name.size()) + " bytes, expected 1 to 65535");
  }
  entries_.push_back({cursor_, size, names_.size(), 0, static_cast<std::uint16_t>(name.size())});
  names_ += name;
  const Placed placed = this->placed(entries_.size() - 1);
  directory_size_ += kCentralHeaderSize + name.size() + zip64_field_size(size, cursor_);
  cursor_ = placed.end;
  return placed;
}

std::string_view Writer::name_of(const Entry& entry) const {
  return std::string_view(names_).substr(entry.name_begin, entry.name_size);
}

Writer::Placed Writer::placed(std::size_t index) const {
  const Entry& entry = entries_.at(index);
  Placed placed;
  placed.header_offset = entry.header_offset;
  placed.size = entry.size;
  const std::uint64_t unpadded =
      checked_add(entry.header_offset, kLocalHeaderSize + entry.name_size +
                                           zip64_field_size(entry.size, entry.header_offset) + 4);
  placed.data_offset = checked_add(unpadded, (alignment_ - unpadded % alignment_) % alignment_);
  placed.descriptor_offset = checked_add(placed.data_offset, entry.size);
  placed.end =
      checked_add(placed.descriptor_offset, descriptor_size(entry.size, entry.header_offset));
  return placed;
}

std::vector<std::byte> Writer::header(std::size_t index) const {
  const Placed placed = this->placed(index);
  const std::string_view name = name_of(entries_[index]);
  // The local header does not know the stored size yet and says 0.
  const std::vector<std::byte> zip64 = zip64_field(placed.size, 0, placed.header_offset);
  const std::uint64_t whole = placed.data_offset - placed.header_offset;
  const std::uint64_t padding = whole - kLocalHeaderSize - name.size() - zip64.size() - 4;
  std::vector<std::byte> header;
  header.reserve(whole);
  append_le(header, kLocalHeader);
  append_le(header, std::uint16_t{0});  // version needed
  append_le(header, flags_of(placed.size));
  header.insert(header.end(), 2 + 2 + 2 + 4 + 4 + 4, std::byte{0});  // method ... sizes
  append_le(header, static_cast<std::uint16_t>(name.size()));
  append_le(header, static_cast<std::uint16_t>(zip64.size() + 4 + padding));
  append(header, name);
  header.insert(header.end(), zip64.begin(), zip64.end());
  append_le(header, kPadding);
  append_le(header, static_cast<std::uint16_t>(padding));
  header.insert(header.end(), padding, std::byte{'Z'});
  return header;
}

std::vector<std::byte> Writer::descriptor(std::size_t index, std::uint32_t crc32) {
  Entry& entry = entries_.at(index);
  entry.crc32 = crc32;
  std::vector<std::byte> bytes;
  if (entry.size == 0) return bytes;
  append_le(bytes, kDescriptor);
  append_le(bytes, crc32);
  if (is_wide(entry.size, entry.header_offset)) {
    append_le(bytes, entry.size);
    append_le(bytes, entry.size);
  } else {
    append_le(bytes, static_cast<std::uint32_t>(entry.size));
    append_le(bytes, static_cast<std::uint32_t>(entry.size));
  }
  return bytes;
}

std::uint64_t Writer::tail_size() const noexcept {
  return directory_size_ + kEnd64Size + kEnd64LocatorSize + kEndSize;
}

std::vector<std::byte> Writer::tail() const {
  std::vector<std::byte> bytes;
  bytes.reserve(tail_size());
  for (const Entry& entry : entries_) {
    const std::vector<std::byte> zip64 = zip64_field(entry.size, entry.size, entry.header_offset);
    append_le(bytes, kCentralHeader);
    append_le(bytes, std::uint32_t{0});  // made by, version needed
    append_le(bytes, flags_of(entry.size));
    bytes.insert(bytes.end(), 2 + 2 + 2, std::byte{0});  // method, time, date
    append_le(bytes, entry.crc32);
    append_le(bytes, low(entry.size));
    append_le(bytes, low(entry.size));
    append_le(bytes, static_cast<std::uint16_t>(entry.name_size));
    append_le(bytes, static_cast<std::uint16_t>(zip64.size()));
    bytes.insert(bytes.end(), 2 + 2 + 2 + 4, std::byte{0});  // comment, disk, attributes
    append_le(bytes, low(entry.header_offset));
    append(bytes, name_of(entry));
    bytes.insert(bytes.end(), zip64.begin(), zip64.end());
  }
  const std::uint64_t count = entries_.size();
  const std::uint64_t size = bytes.size();
  append_le(bytes, kEnd64);
  append_le(bytes, std::uint64_t{kEnd64Size - 12});  // of what follows
  append_le(bytes, std::uint16_t{0x031e});           // made by: Unix, 3.0
  append_le(bytes, std::uint16_t{0x2d});             // version needed: 4.5
  append_le(bytes, std::uint64_t{0});                // disk numbers
  append_le(bytes, count);
  append_le(bytes, count);
  append_le(bytes, size);
  append_le(bytes, cursor_);

  append_le(bytes, kEnd64Locator);
  append_le(bytes, std::uint32_t{0});
  append_le(bytes, cursor_ + size);
  append_le(bytes, std::uint32_t{1});

  const auto count16 = static_cast<std::uint16_t>(std::min<std::uint64_t>(count, 0xFFFF));
  append_le(bytes, kEnd);
  append_le(bytes, std::uint32_t{0});
  append_le(bytes, count16);
  append_le(bytes, count16);
  append_le(bytes, low(size));
  append_le(bytes, low(cursor_));
  append_le(bytes, std::uint16_t{0});  // no comment
  return bytes;
}

}  // namespace tessera::zip
