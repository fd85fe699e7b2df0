#include "checkpoint/read/tail.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "base/digest.h"
#include "base/numbers.h"
#include "base/process.h"
#include "io/checked_source.h"
#include "io/source.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr char kMagic[8] = {'T', 'S', 'R', 'A', 'T', 'A', 'I', 'L'};
constexpr std::uint64_t kTailVersion = 1;
constexpr std::uint64_t kEntry = 8;    // bytes of a digest
constexpr std::uint64_t kFooter = 40;  // bytes: end, items, block, version, magic

ByteView bytes_of(const Digests& digests) {
  return std::as_bytes(std::span(digests));
}

[[noreturn]] void refuse(const ByteSource& source, std::uint64_t offset, const std::string& what) {
  throw Error(ErrorCode::corrupt, what).at_path(source.name()).at_offset(offset);
}

// Reads a file from its end: far away the last 64 KiB, which are the tail of most files, come by
// one request.
class FileEnd {
 public:
  explicit FileEnd(const ByteSource& source) : source_(source), begin_(source.size()) {
    if (source.request_cost() <= kNearRequest) return;
    last_.resize(static_cast<std::size_t>(std::min<std::uint64_t>(begin_, 64U << 10U)));
    begin_ -= last_.size();
    source.read_at(begin_, last_);
  }

  void read_at(std::uint64_t offset, MutableByteView out) const {
    if (offset < begin_) return source_.read_at(offset, out);
    std::memcpy(out.data(), last_.data() + (offset - begin_), out.size());
  }

 private:
  const ByteSource& source_;
  std::uint64_t begin_;  // of what is here
  std::vector<std::byte> last_;
};

struct Footer {
  std::uint64_t end = 0;  // of the last item: where the tail begins
  std::uint64_t items = 0;
};

// Every number is compared with the file's size before it is used.
Footer read_footer(const ByteSource& source, const FileEnd& file) {
  const std::uint64_t size = source.size();
  if (size < kFooter) refuse(source, 0, "the data file is too short for its tail");
  std::byte bytes[kFooter];
  file.read_at(size - kFooter, bytes);
  const Footer footer{load_le<std::uint64_t>(bytes), load_le<std::uint64_t>(bytes + 8)};
  const bool is_known = std::memcmp(bytes + 32, kMagic, sizeof kMagic) == 0 &&
                        load_le<std::uint64_t>(bytes + 24) == kTailVersion &&
                        load_le<std::uint64_t>(bytes + 16) == kDigestBlock;
  if (!is_known || footer.end > size || footer.items > size / kEntry ||
      tail_size(footer.end, footer.items) != size - footer.end)
    refuse(source, size - kFooter, "the data file does not end with a tail that fits its size");
  return footer;
}

struct Tail {
  std::uint64_t end = 0;  // of the last item
  Digests blocks;
  Digests items;  // empty unless asked for
};

// Blocks and items are read in parts: what is kept is no more than the file's size allows.
Tail read_tail(const ByteSource& source, const DataDigest& digest, bool keep_items) {
  const FileEnd file(source);
  const Footer footer = read_footer(source, file);
  const std::uint64_t blocks = digest_blocks(footer.end);
  Tail tail{footer.end, {}, {}};
  RunningDigest running;
  std::vector<std::byte> window(
      static_cast<std::size_t>(std::min(kDigestBlock, source.size() - footer.end)));
  for (std::uint64_t at = footer.end; at < source.size(); at += window.size()) {
    const auto part = MutableByteView(window).first(
        static_cast<std::size_t>(std::min<std::uint64_t>(window.size(), source.size() - at)));
    file.read_at(at, part);
    running.add(part);
    for (std::size_t in = 0; in + kEntry <= part.size(); in += kEntry) {
      const std::uint64_t index = (at - footer.end + in) / kEntry;
      const auto entry = load_le<std::uint64_t>(part.data() + in);
      if (index < blocks) {
        tail.blocks.push_back(entry);
      } else if (keep_items && index - blocks < footer.items) {
        tail.items.push_back(entry);
      }
    }
  }
  if (running.value() != digest.tail)
    refuse(source, footer.end, "the tail of the data file differs from its recorded digest");
  return tail;
}

class TailedSource final : public ForwardingSource {
 public:
  TailedSource(const std::shared_ptr<const ByteSource>& source, const DataDigest& digest)
      : ForwardingSource(source), source_(source), digest_(digest) {}

  [[nodiscard]] bool checked() const override { return true; }
  void read_at(std::uint64_t offset, MutableByteView out) const override {
    require_range(*this, offset, out.size());
    if (out.empty()) return;
    const CheckedSource& items = checked_items();
    const std::uint64_t before = offset < items.size() ? items.size() - offset : 0;
    const auto part =
        out.first(static_cast<std::size_t>(std::min<std::uint64_t>(out.size(), before)));
    if (!part.empty()) items.read_at(offset, part);
    const auto rest = out.subspan(part.size());
    if (!rest.empty()) source_->read_at(offset + part.size(), rest);  // of the tail, found good
  }
  void read_ranges(std::span<const ReadRange> ranges) const override {
    const std::uint64_t end = ranges.empty() ? 0 : checked_items().size();
    const bool is_in_items = std::ranges::all_of(ranges, [end](const ReadRange& range) {
      return range.offset <= end && range.out.size() <= end - range.offset;
    });
    if (is_in_items) {
      if (!ranges.empty()) checked_items().read_ranges(ranges);
      return;
    }
    for (const ReadRange& range : ranges) read_at(range.offset, range.out);
  }

 private:
  const CheckedSource& checked_items() const {
    const std::lock_guard lock(mutex_);
    if (!items_) {
      Tail tail = read_tail(*source_, digest_, false);
      const NoFork moment;
      items_.emplace(slice_source(source_, 0, tail.end), std::move(tail.blocks));
    }
    return *items_;
  }

  std::shared_ptr<const ByteSource> source_;  // which inner() is, for slices
  DataDigest digest_;
  mutable SlowMutex mutex_;
  mutable std::optional<CheckedSource> items_;  // guarded by mutex_; once it is there it stays
};

}  // namespace

std::uint64_t tail_size(std::uint64_t end, std::uint64_t items) {
  return checked_add(checked_mul(checked_add(digest_blocks(end), items), kEntry), kFooter);
}

TailedSink::TailedSink(std::unique_ptr<ByteSink> sink)
    : sink_(std::move(sink)), item_(std::make_unique<BlockDigests>()) {}

TailedSink::~TailedSink() = default;

void TailedSink::write_at(std::uint64_t offset, ByteView bytes) {
  sink_->write_at(offset, bytes);
  blocks_.add(offset, bytes);
  item_->add(offset - end_, bytes);
}

void TailedSink::end_item(std::uint64_t end) {
  items_.push_back(digest64(bytes_of(item_->finish(end - end_))));
  item_ = std::make_unique<BlockDigests>();
  end_ = end;
}

DataDigest TailedSink::finish() {
  std::vector<std::byte> footer;
  for (const std::uint64_t number :
       {end_, std::uint64_t{items_.size()}, kDigestBlock, kTailVersion}) {
    append_le(footer, number);
  }
  const ByteView magic = std::as_bytes(std::span(kMagic));
  footer.insert(footer.end(), magic.begin(), magic.end());
  const Digests blocks = blocks_.finish(end_);
  RunningDigest digest;
  std::uint64_t at = end_;
  for (const ByteView part : {bytes_of(blocks), bytes_of(items_), ByteView(footer)}) {
    sink_->write_at(at, part);
    digest.add(part);
    at += part.size();
  }
  return {at, digest.value()};
}

Digests read_item_digests(const ByteSource& source, const DataDigest& digest) {
  return read_tail(source, digest, true).items;
}

std::shared_ptr<ByteSource> tailed_source(std::shared_ptr<const ByteSource> source,
                                          const DataDigest& digest) {
  return std::make_shared<TailedSource>(std::move(source), digest);
}

}  // namespace tessera
