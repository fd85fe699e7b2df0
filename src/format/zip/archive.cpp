#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <numeric>
#include <optional>
#include <utility>

#include <libdeflate.h>

#include "base/crc32.h"
#include "base/numbers.h"
#include "base/text.h"
#include "format/zip/zip.h"
#include "tessera/error.h"

namespace tessera::zip {
namespace {

constexpr std::uint64_t kTail = 4096;              // read first; holds a DCP item's whole directory
constexpr std::uint64_t kNearby = 4096;            // headers closer than this are read together
constexpr std::uint64_t kWindow = 64U << 10;       // ... up to so many bytes
constexpr std::uint64_t kDirectoryCap = 1U << 30;  // bytes

struct End {
  std::uint64_t count = 0;
  std::uint64_t directory_size = 0;
  std::uint64_t directory_offset = 0;
  std::uint64_t offset = 0;  // of the first end record: the directory ends here
};

struct Record {
  Entry entry;
  std::uint64_t header_offset = 0;
  std::uint16_t flags = 0;
};

std::string text(const std::byte* bytes, std::size_t size) {
  return {reinterpret_cast<const char*>(bytes), size};
}

// Behind a record's local header, or where the directory begins.
std::uint64_t header_end(const Record& record, std::uint64_t directory_offset) {
  const std::uint64_t room = directory_offset - record.header_offset;
  return record.header_offset + std::min(room, kLocalHeaderSize + record.entry.name.size());
}

// Whether a record's header lies behind `until`, and not far behind.
bool is_near(const Record& record, std::uint64_t until, std::uint64_t directory_offset) {
  const std::uint64_t start = record.header_offset;
  return start < directory_offset && start >= until && start - until <= kNearby;
}

// Up to where headers are read at once: behind those of the `following` records that are near
// `until` and close enough to `from`.
std::uint64_t end_of_window(std::span<Record* const> following, std::uint64_t from,
                            std::uint64_t until, std::uint64_t directory_offset) {
  for (const Record* record : following) {
    if (!is_near(*record, until, directory_offset)) break;
    if (header_end(*record, directory_offset) - from > kWindow) break;
    until = header_end(*record, directory_offset);
  }
  return until;
}

// Whether a local header says the directory's CRC and, twice, size.
bool has_numbers_of(const Record& record, const std::byte* at) {
  const bool later = (record.flags & kFlagDescriptor) != 0;  // CRC and sizes may be 0 here
  const auto says = [&](std::size_t where, std::uint64_t what) {
    const auto value = load_le<std::uint32_t>(at + where);
    return value == std::min<std::uint64_t>(what, kIn64) || (later && value == 0);
  };
  return says(14, record.entry.crc32) && says(18, record.entry.stored_size) &&
         says(22, record.entry.size);
}

bool has_name_of(const Record& record, const std::byte* at) {
  const std::string& name = record.entry.name;
  return load_le<std::uint16_t>(at + 26) == name.size() &&
         std::memcmp(at + kLocalHeaderSize, name.data(), name.size()) == 0;
}

// Whether the bytes, which hold a name as long as the directory's, say what the directory says.
bool is_local_header_of(const Record& record, const std::byte* at) {
  return load_le<std::uint32_t>(at) == kLocalHeader &&
         load_le<std::uint16_t>(at + 6) == record.flags &&
         load_le<std::uint16_t>(at + 8) == (record.entry.deflated ? kDeflated : kStored) &&
         has_numbers_of(record, at) && has_name_of(record, at);
}

// Replaces what is all ones by the field's 64-bit numbers: twice the size, then the offset. False:
// the two sizes differ.
bool take_wide(Record& record, const std::byte* field) {
  const bool wide_offset = record.header_offset == kIn64;
  if (record.entry.size == kIn64) {
    record.entry.size = load_le<std::uint64_t>(field);
    if (load_le<std::uint64_t>(field + 8) != record.entry.size) return false;
    record.entry.stored_size = record.entry.size;
    field += 16;
  }
  if (wide_offset) record.header_offset = load_le<std::uint64_t>(field);
  return true;
}

// Whether the entry's two sizes are there as numbers of this type, one after the other.
template <class Number>
bool are_sizes_of(const Entry& entry, const std::byte* at) {
  return load_le<Number>(at) == entry.stored_size &&
         load_le<Number>(at + sizeof(Number)) == entry.size;
}

// A descriptor of 32-bit or of 64-bit sizes.
bool is_descriptor(ByteView bytes, const Entry& entry) {
  const auto are_sizes =
      bytes.size() == kDescriptorSize ? are_sizes_of<std::uint32_t> : are_sizes_of<std::uint64_t>;
  return load_le<std::uint32_t>(&bytes[0]) == kDescriptor &&
         load_le<std::uint32_t>(&bytes[4]) == entry.crc32 && are_sizes(entry, &bytes[8]);
}

// An old number of the end record stands beside its 64-bit one: all ones, or the same.
bool agrees(std::uint64_t old, std::uint64_t ones, std::uint64_t wide) {
  return old == ones || old == wide;
}

bool agree(const End& old, const End& wide) {
  return agrees(old.count, 0xFFFF, wide.count) &&
         agrees(old.directory_size, kIn64, wide.directory_size) &&
         agrees(old.directory_offset, kIn64, wide.directory_offset);
}

// Only these two flags change nothing about the data.
bool is_plain(std::uint16_t flags) {
  return (flags & ~(kFlagDescriptor | kFlagUtf8)) == 0;
}

// `size` bytes; none: these are not that many, deflated.
std::optional<std::vector<std::byte>> inflated(ByteView bytes, std::size_t size) {
  const std::unique_ptr<libdeflate_decompressor, decltype(&libdeflate_free_decompressor)> machine(
      libdeflate_alloc_decompressor(), &libdeflate_free_decompressor);
  if (!machine) throw std::bad_alloc();
  std::vector<std::byte> out(size);
  std::size_t taken = 0;
  const libdeflate_result result = libdeflate_deflate_decompress_ex(
      machine.get(), bytes.data(), bytes.size(), out.data(), out.size(), &taken, nullptr);
  if (result != LIBDEFLATE_SUCCESS || taken != bytes.size()) return std::nullopt;
  return out;
}

// Bytes of the 64-bit field that a record needs; 0: none.
std::size_t wide_size(const Record& record) {
  return (record.entry.size == kIn64 ? 16U : 0U) + (record.header_offset == kIn64 ? 8U : 0U);
}

// The 64-bit field among the extra fields; null: there is none of `need` bytes or more.
const std::byte* find_wide_field(std::span<const std::byte> extra, std::size_t need) {
  while (extra.size() >= 4) {
    const auto id = load_le<std::uint16_t>(extra.data());
    const std::size_t size = load_le<std::uint16_t>(extra.data() + 2);
    extra = extra.subspan(4);
    if (size > extra.size()) break;
    if (id == kZip64Field && size >= need) return extra.data();
    extra = extra.subspan(size);
  }
  return nullptr;
}

std::vector<Record*> sorted_by_offset(std::vector<Record>& records) {
  std::vector<Record*> order(records.size());
  std::ranges::transform(records, order.begin(), [](Record& record) { return &record; });
  std::ranges::stable_sort(order, {}, &Record::header_offset);
  return order;
}

}  // namespace

// Hands out ranges of the source, reading as seldom as it can.
class Archive::Loader {
 public:
  Loader(const ByteSource& source, Deflated deflated)
      : source_(source), deflated_(deflated), size_(source.size()) {
    tail = read(size_ - std::min(size_, kTail), std::min(size_, kTail));
  }

  [[noreturn]] void fail(ErrorCode code, std::string what, std::uint64_t offset) const {
    throw Error(code, std::move(what)).at_path(source_.name()).at_offset(offset);
  }

  // `size` bytes at `offset`, which lie inside the source. When they must be fetched, everything up
  // to `until` is. Valid until the next call.
  const std::byte* view(std::uint64_t offset, std::uint64_t size, std::uint64_t until) {
    for (const Window* window : {&tail, &head, &current_}) {
      if (holds(*window, offset, size)) return window->bytes.data() + (offset - window->offset);
    }
    Window& window = head.bytes.empty() ? head : current_;
    window = read(offset, std::max(size, until - offset));
    return window.bytes.data();
  }

  static bool holds(const Window& window, std::uint64_t offset, std::uint64_t size) {
    return offset >= window.offset && size <= window.bytes.size() &&
           offset - window.offset <= window.bytes.size() - size;
  }

  [[nodiscard]] std::uint64_t size() const { return size_; }

  End find_end();
  void require_place(const End& end, std::uint64_t offset) const;
  void require_count(const End& end, std::uint64_t offset) const;
  std::vector<Record> directory(const End& end);
  void locate(std::vector<Record>& records, std::uint64_t directory_offset);

  Window head;
  Window tail;

 private:
  Window read(std::uint64_t offset, std::uint64_t size) const {
    Window window{offset, std::vector<std::byte>(size)};
    source_.read_at(offset, window.bytes);
    return window;
  }
  void require_one_disk(bool one_disk, std::uint64_t offset) const;
  const std::byte* end_record();
  void explain_missing_end() const;
  std::uint64_t wide_end_offset(const std::byte* locator, std::uint64_t locator_offset) const;
  void widen(End& end, const std::byte* record, std::uint64_t record_offset);
  std::uint64_t central(std::span<const std::byte> bytes, std::uint64_t base, Record& record) const;
  void zip64(std::span<const std::byte> extra, Record& record, std::uint64_t offset) const;
  void require_outside(const Record& record, std::uint64_t done,
                       std::uint64_t directory_offset) const;
  void check_local(Record& record, const std::byte* header, std::uint64_t limit) const;
  void check_gap(const Record& record, std::uint64_t end);

  const ByteSource& source_;
  Deflated deflated_;
  std::uint64_t size_;
  Window current_;
};

void Archive::Loader::require_one_disk(bool one_disk, std::uint64_t offset) const {
  if (!one_disk) fail(ErrorCode::unsupported, "zip archive that spans several disks", offset);
}

// The last bytes of the file.
const std::byte* Archive::Loader::end_record() {
  if (size_ < kEndSize) {
    fail(ErrorCode::incomplete,
         "file of " + std::to_string(size_) + " bytes is too short for a zip archive", size_);
  }
  const std::byte* record = view(size_ - kEndSize, kEndSize, size_);
  if (load_le<std::uint32_t>(record) != kEnd || load_le<std::uint16_t>(record + 20) != 0) {
    explain_missing_end();
  }
  return record;
}

End Archive::Loader::find_end() {
  const std::byte* record = end_record();
  const std::uint64_t offset = size_ - kEndSize;
  End end;
  end.offset = offset;
  end.count = load_le<std::uint16_t>(record + 10);
  end.directory_size = load_le<std::uint32_t>(record + 12);
  end.directory_offset = load_le<std::uint32_t>(record + 16);
  require_one_disk(
      load_le<std::uint32_t>(record + 4) == 0 && load_le<std::uint16_t>(record + 8) == end.count,
      offset);
  if (offset >= kEnd64LocatorSize) {
    const std::uint64_t locator = offset - kEnd64LocatorSize;
    const std::byte* bytes = view(locator, kEnd64LocatorSize, size_);
    if (load_le<std::uint32_t>(bytes) == kEnd64Locator) widen(end, bytes, locator);
  }
  require_place(end, offset);
  require_count(end, offset);
  return end;
}

// That the directory lies where it is said to. `offset`: of the end record, for messages.
void Archive::Loader::require_place(const End& end, std::uint64_t offset) const {
  if (end.directory_size > end.offset || end.directory_offset != end.offset - end.directory_size) {
    fail(ErrorCode::corrupt,
         "central directory of " + std::to_string(end.directory_size) + " bytes at " +
             std::to_string(end.directory_offset) + ", expected to end at " +
             std::to_string(end.offset),
         offset);
  }
}

void Archive::Loader::require_count(const End& end, std::uint64_t offset) const {
  if (end.count > kMaxEntries) {
    fail(ErrorCode::limit,
         "zip archive of " + std::to_string(end.count) + " entries, at most " +
             std::to_string(kMaxEntries) + " are read",
         offset);
  }
  if (end.directory_size < end.count * kCentralHeaderSize) {
    fail(ErrorCode::corrupt,
         "central directory of " + std::to_string(end.directory_size) + " bytes is too short for " +
             std::to_string(end.count) + " entries",
         offset);
  }
  if (end.directory_size > kDirectoryCap) {
    fail(ErrorCode::limit, "central directory of " + std::to_string(end.directory_size) + " bytes",
         offset);
  }
}

// The file does not end in an end record: says whether one is further up.
void Archive::Loader::explain_missing_end() const {
  const std::optional<LastEnd> last = last_end(source_);
  if (!last) {
    fail(ErrorCode::incomplete, "no end record: not a zip archive, or one that was cut short",
         size_);
  }
  if (last->end == size_) fail(ErrorCode::unsupported, "zip archive with a comment", last->record);
  fail(ErrorCode::corrupt,
       std::to_string(size_ - last->end) + " bytes after the end of the zip archive", last->end);
}

// The place of the zip64 end record, which lies in front of its locator.
std::uint64_t Archive::Loader::wide_end_offset(const std::byte* locator,
                                               std::uint64_t locator_offset) const {
  const auto offset = load_le<std::uint64_t>(locator + 8);
  require_one_disk(
      load_le<std::uint32_t>(locator + 4) == 0 && load_le<std::uint32_t>(locator + 16) == 1,
      locator_offset);
  if (offset > locator_offset || locator_offset - offset < kEnd64Size) {
    fail(ErrorCode::corrupt, "zip64 end record said to be at " + std::to_string(offset),
         locator_offset);
  }
  return offset;
}

// Takes the numbers of the zip64 end record that `locator` points to; where the old record has
// numbers of its own they must agree.
void Archive::Loader::widen(End& end, const std::byte* locator, std::uint64_t locator_offset) {
  const std::uint64_t offset = wide_end_offset(locator, locator_offset);
  const std::byte* record = view(offset, kEnd64Size, size_);
  if (load_le<std::uint32_t>(record) != kEnd64 ||
      load_le<std::uint64_t>(record + 4) != locator_offset - offset - 12) {
    fail(ErrorCode::corrupt, "no zip64 end record where the locator says", offset);
  }
  // Some readers take what lies right before the locator for the record, and not what it names.
  if (locator_offset - offset != kEnd64Size)
    fail(ErrorCode::unsupported, "a zip64 end record with data of its own", offset);
  const End old = end;
  end.offset = offset;
  end.count = load_le<std::uint64_t>(record + 32);
  end.directory_size = load_le<std::uint64_t>(record + 40);
  end.directory_offset = load_le<std::uint64_t>(record + 48);
  require_one_disk(
      load_le<std::uint64_t>(record + 16) == 0 && load_le<std::uint64_t>(record + 24) == end.count,
      offset);
  if (!agree(old, end))
    fail(ErrorCode::corrupt, "the two end records of the zip archive disagree", offset);
}

std::vector<Record> Archive::Loader::directory(const End& end) {
  std::vector<std::byte> own;
  std::span<const std::byte> bytes;
  if (holds(tail, end.directory_offset, end.directory_size)) {
    bytes = std::span(tail.bytes).subspan(end.directory_offset - tail.offset, end.directory_size);
  } else {
    own = read(end.directory_offset, end.directory_size).bytes;
    bytes = own;
  }
  std::vector<Record> records(end.count);
  std::uint64_t used = 0;
  for (Record& record : records) {
    used += central(bytes.subspan(used), end.directory_offset + used, record);
  }
  if (used != bytes.size()) {
    fail(ErrorCode::corrupt,
         std::to_string(bytes.size() - used) + " bytes after the last of " +
             std::to_string(end.count) + " directory entries",
         end.directory_offset + used);
  }
  return records;
}

// Parses the directory entry at the start of `bytes`, `base` in the file; returns its length.
std::uint64_t Archive::Loader::central(std::span<const std::byte> bytes, std::uint64_t base,
                                       Record& record) const {
  if (bytes.size() < kCentralHeaderSize || load_le<std::uint32_t>(bytes.data()) != kCentralHeader) {
    fail(ErrorCode::corrupt, "no directory entry where one is due", base);
  }
  const std::byte* at = bytes.data();
  record.flags = load_le<std::uint16_t>(at + 8);
  const auto method = load_le<std::uint16_t>(at + 10);
  record.entry.crc32 = load_le<std::uint32_t>(at + 16);
  record.entry.deflated = method == kDeflated;
  record.entry.stored_size = load_le<std::uint32_t>(at + 20);
  record.entry.size = load_le<std::uint32_t>(at + 24);
  const std::size_t name = load_le<std::uint16_t>(at + 28);
  const std::size_t extra = load_le<std::uint16_t>(at + 30);
  const std::size_t comment = load_le<std::uint16_t>(at + 32);
  const auto disk = load_le<std::uint16_t>(at + 34);
  record.header_offset = load_le<std::uint32_t>(at + 42);
  const std::uint64_t length = kCentralHeaderSize + name + extra + comment;
  if (length > bytes.size() || name == 0) {
    fail(ErrorCode::corrupt,
         "directory entry of " + std::to_string(length) + " bytes with a name of " +
             std::to_string(name) + ", " + std::to_string(bytes.size()) + " are left",
         base);
  }
  record.entry.name = text(at + kCentralHeaderSize, name);
  if (record.entry.name.find('\0') != std::string::npos)
    fail(ErrorCode::corrupt, "a zip entry whose name has a NUL, where readers cut it", base);
  const bool is_taken = method == kStored || (method == kDeflated && deflated_ == Deflated::allow);
  const bool is_wide = is_one_of(kIn64, record.entry.size, record.entry.stored_size);
  if (!is_plain(record.flags) || !is_taken || disk != 0 || (is_wide && record.entry.deflated)) {
    fail(ErrorCode::unsupported,
         "zip entry '" + record.entry.name + "' with method " + std::to_string(method) +
             " and flags " + std::to_string(record.flags) + ", expected plain stored data",
         base);
  }
  if (record.entry.stored_size != record.entry.size && !record.entry.deflated) {
    fail(ErrorCode::corrupt, "zip entry '" + record.entry.name + "' has two sizes", base);
  }
  zip64(bytes.subspan(kCentralHeaderSize + name, extra), record, base);
  return length;
}

// Replaces the numbers that are in the 64-bit extra field.
void Archive::Loader::zip64(std::span<const std::byte> extra, Record& record,
                            std::uint64_t offset) const {
  const std::size_t need = wide_size(record);
  if (need == 0) return;
  const std::byte* field = find_wide_field(extra, need);
  if (field == nullptr || !take_wide(record, field)) {
    fail(ErrorCode::corrupt, "zip entry '" + record.entry.name + "' without its 64-bit sizes",
         offset);
  }
}

// A record's header lies behind all that is accounted for, up to `done`, and before the directory.
void Archive::Loader::require_outside(const Record& record, std::uint64_t done,
                                      std::uint64_t directory_offset) const {
  const std::uint64_t start = record.header_offset;
  const std::uint64_t length = kLocalHeaderSize + record.entry.name.size();
  if (start >= directory_offset || directory_offset - start < length) {
    fail(ErrorCode::corrupt, "zip entry '" + record.entry.name + "' lies outside the file", start);
  }
  if (start < done) {
    fail(ErrorCode::corrupt, "zip entry '" + record.entry.name + "' overlaps the one before it",
         start);
  }
}

// Finds every entry's data and proves that entries, with their headers and descriptors, tile the
// file.
void Archive::Loader::locate(std::vector<Record>& records, std::uint64_t directory_offset) {
  const std::vector<Record*> order = sorted_by_offset(records);
  std::uint64_t done = 0;  // everything before is accounted for, except a descriptor
  for (std::size_t i = 0; i < order.size(); ++i) {
    Record& record = *order[i];
    const std::uint64_t start = record.header_offset;
    require_outside(record, done, directory_offset);
    const std::uint64_t length = kLocalHeaderSize + record.entry.name.size();
    const std::uint64_t from = start - std::min(start - done, kDescriptor64Size);
    const std::uint64_t until =
        end_of_window(std::span(order).subspan(i + 1), from, start + length, directory_offset);
    view(from, start + length - from, until);
    if (i > 0) check_gap(*order[i - 1], start);
    if (i == 0 && start != 0) fail(ErrorCode::corrupt, "bytes before the first zip entry", 0);
    check_local(record, view(start, length, until), directory_offset);
    done = record.entry.data_offset + record.entry.stored_size;
  }
  if (!order.empty()) return check_gap(*order.back(), directory_offset);
  if (directory_offset != 0) {
    fail(ErrorCode::corrupt, "bytes before the directory of an empty zip archive", 0);
  }
}

// Compares the local header with the directory and sets the data's offset. `limit`: where data must
// end.
void Archive::Loader::check_local(Record& record, const std::byte* at, std::uint64_t limit) const {
  Entry& entry = record.entry;
  const std::uint64_t offset = record.header_offset;
  if (!is_local_header_of(record, at)) {
    fail(ErrorCode::corrupt,
         "local header of zip entry '" + entry.name + "' contradicts the directory", offset);
  }
  const std::uint64_t header =
      kLocalHeaderSize + entry.name.size() + load_le<std::uint16_t>(at + 28);
  if (header > limit - offset || entry.stored_size > limit - offset - header) {
    fail(ErrorCode::corrupt,
         "zip entry '" + entry.name + "' of " + std::to_string(entry.stored_size) +
             " bytes runs into the directory",
         offset);
  }
  entry.data_offset = offset + header;
}

// Between an entry's data and `end`, the start of what follows, there is its descriptor and nothing
// else.
void Archive::Loader::check_gap(const Record& record, std::uint64_t end) {
  const Entry& entry = record.entry;
  const std::uint64_t start = entry.data_offset + entry.stored_size;
  const std::uint64_t gap = end - start;
  const bool announced = (record.flags & kFlagDescriptor) != 0;
  if (gap == 0 && (!announced || entry.stored_size == 0)) return;
  const bool right = announced && is_one_of(gap, kDescriptorSize, kDescriptor64Size) &&
                     is_descriptor({view(start, gap, end), gap}, entry);
  if (!right) {
    fail(ErrorCode::corrupt,
         std::to_string(gap) + " bytes after zip entry '" + entry.name +
             "' are not the descriptor that the directory calls for",
         start);
  }
}

Archive::Archive(std::shared_ptr<const ByteSource> source, Deflated deflated)
    : source_(std::move(source)) {
  Loader loader(*source_, deflated);
  const End end = loader.find_end();
  std::vector<Record> records = loader.directory(end);
  loader.locate(records, end.directory_offset);
  head_ = std::move(loader.head);
  tail_ = std::move(loader.tail);

  by_name_.resize(records.size());
  std::iota(by_name_.begin(), by_name_.end(), 0U);
  std::sort(by_name_.begin(), by_name_.end(),
            [&](auto a, auto b) { return records[a].entry.name < records[b].entry.name; });
  for (std::size_t i = 1; i < by_name_.size(); ++i) {
    const Record& record = records[by_name_[i]];
    if (record.entry.name == records[by_name_[i - 1]].entry.name) {
      loader.fail(ErrorCode::corrupt, "two zip entries are called '" + record.entry.name + "'",
                  record.header_offset);
    }
  }
  entries_.reserve(records.size());
  for (Record& record : records) entries_.push_back(std::move(record.entry));
}

const Entry* Archive::find(std::string_view name) const {
  const auto found =
      std::lower_bound(by_name_.begin(), by_name_.end(), name,
                       [&](auto index, auto wanted) { return entries_[index].name < wanted; });
  return found != by_name_.end() && entries_[*found].name == name ? &entries_[*found] : nullptr;
}

// The range that holds an entry's data already; null: it must be read.
const Archive::Window* Archive::window_of(const Entry& entry) const {
  const auto holds = [&entry](const Window& window) {
    return Loader::holds(window, entry.data_offset, entry.stored_size);
  };
  if (holds(head_)) return &head_;
  return holds(tail_) ? &tail_ : nullptr;
}

// `what`: behind the entry's name.
void Archive::refuse(ErrorCode code, const Entry& entry, const std::string& what) const {
  throw Error(code, "zip entry '" + entry.name + "' " + what)
      .at_path(source_->name())
      .at_offset(entry.data_offset);
}

std::vector<std::byte> Archive::stored(const Entry& entry) const {
  std::vector<std::byte> bytes(entry.stored_size);
  if (const Window* held = window_of(entry)) {
    const auto* from = held->bytes.data() + (entry.data_offset - held->offset);
    std::copy(from, from + entry.stored_size, bytes.begin());
  } else {
    source_->read_at(entry.data_offset, bytes);
  }
  return bytes;
}

std::vector<std::byte> Archive::read(const Entry& entry, std::uint64_t cap) const {
  if (const auto size = std::max(entry.size, entry.stored_size); size > cap) {
    refuse(ErrorCode::limit, entry,
           "of " + std::to_string(size) + " bytes, at most " + std::to_string(cap) + " are read");
  }
  std::vector<std::byte> bytes = stored(entry);
  if (entry.deflated) {
    auto data =
        entry.size / kMostInflated > entry.stored_size ? std::nullopt : inflated(bytes, entry.size);
    if (!data)
      refuse(ErrorCode::corrupt, entry,
             "is not " + std::to_string(entry.size) + " bytes, deflated");
    bytes = *std::move(data);
  }
  const std::uint32_t found = crc32(bytes);
  if (entry.crc32 != 0 && found != entry.crc32) {
    refuse(ErrorCode::corrupt, entry,
           "has CRC-32 " + std::to_string(found) + ", recorded is " + std::to_string(entry.crc32));
  }
  return bytes;
}

}  // namespace tessera::zip
