// ZIP archives as torch.save writes them (checkpoint-rows F-01): entries stored, zip64, data at
// multiples of 64.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/error.h"
#include "tessera/io.h"

namespace tessera::zip {

struct Entry {
  std::string name;               // as in the archive, with the root folder
  std::uint64_t data_offset = 0;  // of the first data byte from the archive's start
  std::uint64_t size = 0;         // bytes
  std::uint64_t stored_size = 0;  // bytes in the archive
  std::uint32_t crc32 = 0;        // as recorded in the central directory
  bool deflated = false;          // else the bytes in the archive are the data
};

// Archives of TorchScript have their code deflated.
enum class Deflated : std::uint8_t { refuse, allow };

// The archive's directory, in central-directory order. Reads the end record, the central directory
// and the local headers with the descriptors between them, neighbours in one read; data is read
// only where it lies between headers that are close together. Every byte of the file belongs to
// something: refused (each with its offset) are compressed entries unless they are deflated and
// that is allowed, encrypted ones, comments and spanned archives (`unsupported`), names that
// repeat, entries that overlap, leave holes or leave the file, local headers and descriptors that
// contradict the directory (`corrupt`), a missing end record
// (`incomplete`), and more than kMaxEntries entries (`limit`).
class Archive {
 public:
  static constexpr std::uint64_t kMaxEntries = 1'000'000;

  explicit Archive(std::shared_ptr<const ByteSource> source, Deflated deflated = Deflated::refuse);
  [[nodiscard]] const std::vector<Entry>& entries() const noexcept { return entries_; }
  [[nodiscard]] const Entry* find(std::string_view name) const;  // null: absent
  // The whole entry as it was before it was deflated, CRC-32 checked (`corrupt` on a difference; a
  // recorded 0 is "not computed"). Throws `limit` when it is larger than `cap`.
  [[nodiscard]] std::vector<std::byte> read(const Entry& entry, std::uint64_t cap) const;
  [[nodiscard]] const std::shared_ptr<const ByteSource>& source() const noexcept { return source_; }

 private:
  // A range of the source that is in memory already.
  struct Window {
    std::uint64_t offset = 0;
    std::vector<std::byte> bytes;
  };
  class Loader;

  [[nodiscard]] const Window* window_of(const Entry& entry) const;
  [[nodiscard]] std::vector<std::byte> stored(const Entry& entry) const;
  [[noreturn]] void refuse(ErrorCode code, const Entry& entry, const std::string& what) const;

  std::shared_ptr<const ByteSource> source_;
  std::vector<Entry> entries_;
  std::vector<std::uint32_t> by_name_;  // indices of entries_, sorted by name
  Window head_;                         // the first headers and what lies between them
  Window tail_;                         // the end of the file
};

// The last end record of a file, be it that more follows.
struct LastEnd {
  std::uint64_t record = 0;  // where it begins
  std::uint64_t end = 0;     // behind its comment
};
// None: there is none as far from the end as a comment can move it, where other readers look.
[[nodiscard]] std::optional<LastEnd> last_end(const ByteSource& source);

// Plans and encodes an archive, byte for byte as PyTorch's own writer. The caller places the data:
// add entries in order, write each one's `header` bytes, its data at `data_offset` and its
// `descriptor`, and finally the `tail`. Sizes must be known when an entry is added, CRCs only
// later. An entry takes some forty bytes here and its name.
class Writer {
 public:
  struct Placed {
    std::uint64_t header_offset = 0;  // where `header` goes
    std::uint64_t data_offset = 0;    // multiple of the alignment, from the archive's start
    std::uint64_t size = 0;
    std::uint64_t descriptor_offset = 0;
    std::uint64_t end = 0;  // of the descriptor: the next entry's header_offset
  };
  // `alignment`: at most 32768, the reach of the padding field.
  explicit Writer(std::uint64_t alignment = 64);
  // `name`: 1 to 65535 bytes, not checked for repetition.
  Placed add(std::string_view name, std::uint64_t size);
  // The local header of entry `index` with its padding: data follows it directly.
  [[nodiscard]] std::vector<std::byte> header(std::size_t index) const;
  // Records the CRC and returns the data descriptor that follows entry `index`'s data; entries
  // without data have none.
  std::vector<std::byte> descriptor(std::size_t index, std::uint32_t crc32);
  [[nodiscard]] Placed placed(std::size_t index) const;
  [[nodiscard]] std::size_t count() const noexcept { return entries_.size(); }
  [[nodiscard]] std::uint64_t tail_offset() const noexcept { return cursor_; }
  // The tail's length, before any CRC is known.
  [[nodiscard]] std::uint64_t tail_size() const noexcept;
  // Central directory and end records; every entry's CRC must have been recorded.
  [[nodiscard]] std::vector<std::byte> tail() const;

 private:
  struct Entry {
    std::uint64_t header_offset = 0;
    std::uint64_t size = 0;
    std::uint64_t name_begin = 0;  // in names_
    std::uint32_t crc32 = 0;
    std::uint16_t name_size = 0;
  };
  [[nodiscard]] std::string_view name_of(const Entry& entry) const;
  std::uint64_t alignment_;
  std::uint64_t cursor_ = 0;
  std::uint64_t directory_size_ = 0;
  std::vector<Entry> entries_;
  std::string names_;
};

// Numbers of the zip format that the reader and the writer share.

inline constexpr std::uint32_t kLocalHeader = 0x04034b50;    // "PK\3\4"
inline constexpr std::uint32_t kDescriptor = 0x08074b50;     // "PK\7\8"
inline constexpr std::uint32_t kCentralHeader = 0x02014b50;  // "PK\1\2"
inline constexpr std::uint32_t kEnd64 = 0x06064b50;          // "PK\6\6"
inline constexpr std::uint32_t kEnd64Locator = 0x07064b50;   // "PK\6\7"
inline constexpr std::uint32_t kEnd = 0x06054b50;            // "PK\5\6"

inline constexpr std::uint64_t kLocalHeaderSize = 30;    // without name and extra fields
inline constexpr std::uint64_t kCentralHeaderSize = 46;  // without name, extra fields and comment
inline constexpr std::uint64_t kEnd64Size = 56;
inline constexpr std::uint64_t kEnd64LocatorSize = 20;
inline constexpr std::uint64_t kEndSize = 22;
inline constexpr std::uint64_t kDescriptorSize = 16;    // with 32-bit sizes
inline constexpr std::uint64_t kDescriptor64Size = 24;  // with 64-bit sizes

inline constexpr std::uint16_t kZip64Field = 1;  // id of the extra field with 64-bit numbers
inline constexpr std::uint32_t kIn64 =
    0xFFFFFFFF;  // "see the 64-bit field"; values from here on go there

inline constexpr std::uint16_t kStored = 0, kDeflated = 8;  // methods
inline constexpr std::uint64_t kMostInflated = 1032;        // bytes that one can stand for

inline constexpr std::uint16_t kFlagDescriptor = 1U << 3;
inline constexpr std::uint16_t kFlagUtf8 = 1U << 11;

}  // namespace tessera::zip
