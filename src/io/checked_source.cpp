#include "io/checked_source.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/digest.h"
#include "base/log.h"
#include "base/numbers.h"
#include "base/recent_blocks.h"
#include "io/source.h"
#include "tessera/error.h"

namespace tessera {

// A block that has come in part. `next` bytes are under the digest; `early` parts lie behind a gap.
struct BlockDigests::Open {
  std::mutex mutex;  // guards everything below
  RunningDigest digest;
  std::uint64_t next = 0;
  std::map<std::uint64_t, std::vector<std::byte>> early;  // by place in the block

  void take(std::uint64_t within, ByteView bytes) {
    if (within != next) {
      early.emplace(within, std::vector<std::byte>(bytes.begin(), bytes.end()));
      return;
    }
    digest.add(bytes);
    next += bytes.size();
    for (auto part = early.find(next); part != early.end(); part = early.find(next)) {
      digest.add(part->second);
      next += part->second.size();
      early.erase(part);
    }
  }

  // Closes every gap up to `size` with zeros: what a file has where nobody wrote.
  void fill(std::uint64_t size) {
    while (next < size) {
      const std::uint64_t gap_end = early.empty() ? size : early.begin()->first;
      take(next, std::vector<std::byte>(static_cast<std::size_t>(gap_end - next)));
    }
  }
};

void BlockDigests::add(std::uint64_t offset, ByteView bytes) {
  while (!bytes.empty()) {
    const std::uint64_t block = offset / kDigestBlock;
    const std::uint64_t within = offset % kDigestBlock;
    const auto part =
        bytes.first(std::min<std::size_t>(bytes.size(), std::size_t{kDigestBlock - within}));
    if (part.size() == kDigestBlock) {
      store(block, digest64(part));
    } else {
      add_part(block, within, part);
    }
    offset += part.size();
    bytes = bytes.subspan(part.size());
  }
}

void BlockDigests::add_part(std::uint64_t block, std::uint64_t within, ByteView bytes) {
  std::shared_ptr<Open> open;
  {
    const std::lock_guard lock(mutex_);
    auto& slot = open_[block];
    if (!slot) slot = std::make_shared<Open>();
    open = slot;
  }
  std::uint64_t digest = 0;
  {
    const std::lock_guard lock(open->mutex);
    open->take(within, bytes);
    if (open->next != kDigestBlock) return;
    digest = open->digest.value();
  }
  store(block, digest);
  const std::lock_guard lock(mutex_);
  open_.erase(block);
}

void BlockDigests::store(std::uint64_t block, std::uint64_t digest) {
  const std::lock_guard lock(mutex_);
  if (done_.size() <= block) done_.resize(narrow<std::size_t>(block) + 1);
  done_[block] = digest;
}

Digests BlockDigests::finish(std::uint64_t size) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t blocks = digest_blocks(size);
  done_.resize(narrow<std::size_t>(blocks));
  for (auto& [block, open] : open_) {
    open->fill(std::min(kDigestBlock, size - block * kDigestBlock));
    done_[block] = open->digest.value();
  }
  open_.clear();
  return std::exchange(done_, {});
}

void DigestSink::write_at(std::uint64_t offset, ByteView bytes) {
  sink_->write_at(offset, bytes);
  const std::uint64_t end = checked_add<std::uint64_t>(offset, bytes.size());
  {
    const std::lock_guard lock(mutex_);
    end_ = std::max(end_, end);
  }
  const std::uint64_t before = offset < origin_ ? std::min(origin_, end) - offset : 0;
  const ByteView behind = bytes.subspan(static_cast<std::size_t>(before));
  if (!behind.empty()) blocks_.add(offset + before - origin_, behind);
}

Digests DigestSink::digests() {
  const std::uint64_t end = size();
  return blocks_.finish(end > origin_ ? end - origin_ : 0);
}

std::uint64_t DigestSink::size() {
  const std::lock_guard lock(mutex_);
  return end_;
}

namespace {

// The block that a thread read last, of whichever source.
struct LastBlock {
  std::uint64_t source = 0;  // its id; 0: none
  std::uint64_t block = 0;
  std::vector<std::byte> bytes;
};

LastBlock& last_block() {
  thread_local LastBlock last;
  return last;
}

constexpr std::size_t kEndOfArchive = 64 << 10;

// Far away, of all sources: the next read often wants the rest of a block.
RecentBlocks recent_blocks(32);  // of 1 MiB

std::uint64_t fresh_id() {
  static std::atomic<std::uint64_t> next{1};
  return next.fetch_add(1);
}

}  // namespace

CheckedSource::CheckedSource(std::shared_ptr<const ByteSource> source, Digests digests,
                             std::uint64_t origin)
    : ForwardingSource(std::move(source)),
      digests_(std::move(digests)),
      origin_(origin),
      id_(fresh_id()),
      good_(digests_.size()) {
  if (inner().checked())
    throw Error(ErrorCode::invalid_argument, "a checked source in another one")
        .at_path(inner().name());
  const std::uint64_t size = inner().size();
  const std::uint64_t blocks = size < origin_ ? 0 : digest_blocks(size - origin_);
  if (size < origin_ || blocks != digests_.size()) {
    throw Error(blocks < digests_.size() ? ErrorCode::incomplete : ErrorCode::corrupt,
                "there are digests for " + std::to_string(digests_.size()) +
                    " blocks, the object has " + std::to_string(blocks))
        .at_path(inner().name());
  }
}

// Bytes may be damaged on their way, so they are asked for once more (fault-rows O07).
void CheckedSource::check(std::uint64_t block, MutableByteView bytes) const {
  const std::uint64_t begin = begin_of(block);
  if (digest64(bytes) != digests_[block]) {
    inner().read_at(begin, bytes);
    if (digest64(bytes) == digests_[block]) {
      log(LogLevel::warning, name() + ": the block at " + std::to_string(begin) +
                                 " came with other bytes than were recorded, and right when it "
                                 "was read again");
      return;
    }
    throw Error(ErrorCode::corrupt, "the block of " + std::to_string(bytes.size()) +
                                        " bytes here differs from its recorded digest")
        .at_path(name())
        .at_offset(begin);
  }
  good_[block].store(true, std::memory_order_relaxed);
}

void CheckedSource::read_at(std::uint64_t offset, MutableByteView out) const {
  require_range(*this, offset, out.size());
  if (inner().request_cost() > kNearRequest) {
    const ReadRange range{offset, out};
    return read_far({&range, 1});
  }
  if (offset < origin_) {
    const auto head =
        out.first(static_cast<std::size_t>(std::min<std::uint64_t>(out.size(), origin_ - offset)));
    inner().read_at(offset, head);
    out = out.subspan(head.size());
    offset += head.size();
  }
  while (!out.empty()) {
    const std::uint64_t block = (offset - origin_) / kDigestBlock;
    const std::uint64_t within = (offset - origin_) % kDigestBlock;
    const std::uint64_t block_size = size_of(block);
    const auto part = out.first(
        static_cast<std::size_t>(std::min<std::uint64_t>(out.size(), block_size - within)));
    if (part.size() == block_size) {
      read_whole(block, part);
    } else {
      read_part(block, within, part);
    }
    out = out.subspan(part.size());
    offset += part.size();
  }
}

// Whether the range lies in blocks that were found good before.
bool CheckedSource::is_good(const ReadRange& range) const {
  if (range.out.empty() || range.offset < origin_) return false;
  const std::uint64_t first = (range.offset - origin_) / kDigestBlock;
  const std::uint64_t last = (range.offset - origin_ + range.out.size() - 1) / kDigestBlock;
  for (std::uint64_t block = first; block <= last; ++block) {
    if (block >= good_.size() || !good_[block].load(std::memory_order_relaxed)) return false;
  }
  return true;
}

// Where each request costs, all blocks of a read are asked for together.
class CheckedSource::Batch {
 public:
  explicit Batch(const CheckedSource& source) : source_(source) {}

  void add(std::uint64_t offset, MutableByteView out) {
    if (offset < source_.origin_) {
      const auto head = out.first(
          static_cast<std::size_t>(std::min<std::uint64_t>(out.size(), source_.origin_ - offset)));
      want(offset, head);
      out = out.subspan(head.size());
      offset += head.size();
    }
    while (!out.empty()) {
      const std::uint64_t block = (offset - source_.origin_) / kDigestBlock;
      const std::uint64_t within = (offset - source_.origin_) % kDigestBlock;
      const auto part = out.first(static_cast<std::size_t>(
          std::min<std::uint64_t>(out.size(), source_.size_of(block) - within)));
      part.size() == source_.size_of(block) ? add_whole(block, part)
                                            : add_part(block, within, part);
      out = out.subspan(part.size());
      offset += part.size();
    }
    if (around_.size() > kMostAround) finish();
  }

  // Reads and compares what was added, and brings it into its place.
  void finish() {
    read_wanted();
    for (const auto& [block, bytes] : whole_) source_.check(block, bytes);
    for (auto& [block, around] : around_) source_.check(block, *around.bytes);
    for (const Part& part : parts_) copy(part, *around_.at(part.block).bytes);
    for (auto& [block, around] : around_) around.claim.keep(std::move(around.bytes));
    wanted_.clear();
    whole_.clear();
    parts_.clear();
    around_.clear();
    // Nobody waits for this thread any more, so it may wait for others.
    for (const Part& part : coming_) {
      copy(part, *recent_blocks.get(source_.key(part.block),
                                    [&] { return source_.read_block(part.block, recent_blocks); }));
    }
    coming_.clear();
  }

 private:
  static constexpr std::size_t kMostAround = 16;  // blocks that are in memory for their parts
  struct Part {
    std::uint64_t block, within;
    MutableByteView out;
  };

  // A whole block, of which parts are wanted.
  struct Around {
    RecentBlocks::Claim claim;
    std::shared_ptr<std::vector<std::byte>> bytes;
  };

  void read_wanted() {
    try {
      source_.inner().read_ranges(wanted_);
    } catch (...) {
      for (auto& [block, around] : around_) around.claim.fail(std::current_exception());
      throw;
    }
  }

  static void copy(const Part& part, const std::vector<std::byte>& block) {
    std::memcpy(part.out.data(), block.data() + part.within, part.out.size());
  }

  void want(std::uint64_t offset, MutableByteView out) {
    if (!wanted_.empty()) {
      ReadRange& last = wanted_.back();
      const bool goes_on = last.offset + last.out.size() == offset &&
                           last.out.data() + last.out.size() == out.data();
      if (goes_on) {
        last.out = {last.out.data(), last.out.size() + out.size()};
        return;
      }
    }
    wanted_.push_back({offset, out});
  }

  void add_whole(std::uint64_t block, MutableByteView out) {
    const auto [bytes, is_coming] = recent_blocks.find(source_.key(block));
    if (bytes) return copy({block, 0, out}, *bytes);
    if (is_coming) {
      (around_.contains(block) ? parts_ : coming_).push_back({block, 0, out});
      return;
    }
    want(source_.begin_of(block), out);
    whole_.emplace_back(block, out);
  }

  void add_part(std::uint64_t block, std::uint64_t within, MutableByteView out) {
    const Part part{block, within, out};
    // Also of one that was good before: every answer may be damaged.
    if (!around_.contains(block)) {
      std::optional<RecentBlocks::Claim> claim;
      const auto [bytes, is_coming] = recent_blocks.find(source_.key(block), claim);
      if (bytes) return copy(part, *bytes);
      if (is_coming) {
        coming_.push_back(part);
        return;
      }
      auto room = recent_blocks.room(static_cast<std::size_t>(source_.size_of(block)));
      want(source_.begin_of(block), *room);
      around_.emplace(block, Around{std::move(*claim), std::move(room)});
    }
    parts_.push_back(part);
  }

  const CheckedSource& source_;
  std::vector<ReadRange> wanted_;
  std::vector<std::pair<std::uint64_t, MutableByteView>> whole_;
  std::map<std::uint64_t, Around> around_;
  std::vector<Part> parts_;   // of these blocks
  std::vector<Part> coming_;  // of blocks that other threads read
};

void CheckedSource::read_far(std::span<const ReadRange> ranges) const {
  Batch batch(*this);
  for (const ReadRange& range : ranges) {
    require_range(*this, range.offset, range.out.size());
    batch.add(range.offset, range.out);
  }
  batch.finish();
}

void CheckedSource::read_ranges(std::span<const ReadRange> ranges) const {
  if (inner().request_cost() > kNearRequest) return read_far(ranges);
  // What was found good may be in memory that the threads of a job share.
  const bool shares = SharedBlocks::here() != nullptr;
  std::vector<ReadRange> good;
  for (const ReadRange& range : ranges) {
    if (!shares && is_good(range)) {
      good.push_back(range);
    } else {
      read_at(range.offset, range.out);
    }
  }
  inner().read_ranges(good);
}

RecentBlocks::Bytes CheckedSource::read_block(std::uint64_t block, RecentBlocks& blocks) const {
  auto bytes = blocks.room(static_cast<std::size_t>(size_of(block)));
  inner().read_at(begin_of(block), *bytes);
  check(block, *bytes);
  return bytes;
}

// Straight into its place, unless a part of it was wanted a moment ago: the end of an archive is.
void CheckedSource::read_whole(std::uint64_t block, MutableByteView out) const {
  RecentBlocks* const blocks = SharedBlocks::here();
  if (blocks != nullptr) {
    if (const auto bytes = blocks->wait_for(key(block))) {
      std::memcpy(out.data(), bytes->data(), out.size());
      return blocks->took(key(block), true, true);
    }
  }
  inner().read_at(begin_of(block), out);
  check(block, out);
}

void CheckedSource::read_part(std::uint64_t block, std::uint64_t within,
                              MutableByteView out) const {
  if (RecentBlocks* const blocks = SharedBlocks::here()) {
    auto bytes = blocks->wait_for(key(block));
    if (!bytes && good_[block].load(std::memory_order_relaxed))
      return inner().read_at(begin_of(block) + within, out);
    if (!bytes) bytes = blocks->get(key(block), [&] { return read_block(block, *blocks); });
    std::memcpy(out.data(), bytes->data() + within, out.size());
    // The end of an archive is read before its elements, and is no reason to let a block go.
    const bool is_end = within + out.size() == bytes->size() && out.size() > kEndOfArchive;
    return blocks->took(key(block), within == 0, is_end);
  }
  LastBlock& last = last_block();
  if (last.source != id_ || last.block != block) {
    if (good_[block].load(std::memory_order_relaxed))
      return inner().read_at(begin_of(block) + within, out);
    last.source = 0;  // until the bytes are found good
    last.bytes.resize(static_cast<std::size_t>(size_of(block)));
    inner().read_at(begin_of(block), last.bytes);
    check(block, last.bytes);
    last.source = id_;
    last.block = block;
  }
  std::memcpy(out.data(), last.bytes.data() + within, out.size());
}

}  // namespace tessera
