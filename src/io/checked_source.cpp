#include "io/checked_source.h"

#include <algorithm>
#include <cstring>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "base/digest.h"
#include "base/fork.h"
#include "base/log.h"
#include "io/range.h"
#include "tessera/error.h"

namespace tessera {
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

// Blocks far away of which parts were read, of all sources: the next read often wants the rest.
class RecentBlocks {
 public:
  using Bytes = std::shared_ptr<const std::vector<std::byte>>;

  // Null: it is not there any more.
  Bytes find(std::uint64_t source, std::uint64_t block) {
    const std::lock_guard lock(mutex_);
    const auto found = std::ranges::find_if(
        recent_, [&](const Recent& one) { return one.source == source && one.block == block; });
    if (found == recent_.end()) return nullptr;
    recent_.splice(recent_.begin(), recent_, found);
    return found->bytes;
  }
  void keep(std::uint64_t source, std::uint64_t block, Bytes bytes) {
    const std::lock_guard lock(mutex_);
    recent_.push_front({source, block, std::move(bytes)});
    if (recent_.size() > kMost) recent_.pop_back();
  }

 private:
  static constexpr std::size_t kMost = 32;  // of 1 MiB
  struct Recent {
    std::uint64_t source, block;
    Bytes bytes;
  };
  ShortMutex mutex_;
  std::list<Recent> recent_;  // guarded by mutex_; the last used one first
};

RecentBlocks recent_blocks;

std::uint64_t fresh_id() {
  static std::atomic<std::uint64_t> next{1};
  return next.fetch_add(1);
}

}  // namespace

CheckedSource::CheckedSource(std::shared_ptr<const ByteSource> source, Digests digests,
                             std::uint64_t origin)
    : source_(std::move(source)),
      digests_(std::move(digests)),
      origin_(origin),
      id_(fresh_id()),
      good_(digests_.size()) {
  if (source_->checked())
    throw Error(ErrorCode::invalid_argument, "a checked source in another one")
        .at_path(source_->name());
  const std::uint64_t size = source_->size();
  const std::uint64_t blocks = size < origin_ ? 0 : digest_blocks(size - origin_);
  if (size < origin_ || blocks != digests_.size()) {
    throw Error(blocks < digests_.size() ? ErrorCode::incomplete : ErrorCode::corrupt,
                "there are digests for " + std::to_string(digests_.size()) +
                    " blocks, the object has " + std::to_string(blocks))
        .at_path(source_->name());
  }
}

// Bytes may be damaged on their way, so they are asked for once more (fault-rows O07).
void CheckedSource::check(std::uint64_t block, MutableByteView bytes) const {
  const std::uint64_t begin = origin_ + block * kDigestBlock;
  if (digest64(bytes) != digests_[block]) {
    source_->read_at(begin, bytes);
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
  if (source_->request_cost() > kNearRequest) {
    const ReadRange range{offset, out};
    return read_far({&range, 1});
  }
  if (offset < origin_) {
    const auto head =
        out.first(static_cast<std::size_t>(std::min<std::uint64_t>(out.size(), origin_ - offset)));
    source_->read_at(offset, head);
    out = out.subspan(head.size());
    offset += head.size();
  }
  while (!out.empty()) {
    const std::uint64_t block = (offset - origin_) / kDigestBlock;
    const std::uint64_t within = (offset - origin_) % kDigestBlock;
    const std::uint64_t block_size =
        std::min(kDigestBlock, size() - origin_ - block * kDigestBlock);
    const auto part = out.first(
        static_cast<std::size_t>(std::min<std::uint64_t>(out.size(), block_size - within)));
    if (part.size() == block_size) {
      source_->read_at(offset, part);
      check(block, part);
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
      const auto part = out.first(
          static_cast<std::size_t>(std::min<std::uint64_t>(out.size(), size_of(block) - within)));
      part.size() == size_of(block) ? add_whole(block, part) : add_part(block, within, part);
      out = out.subspan(part.size());
      offset += part.size();
    }
    if (around_.size() > kMostAround) finish();
  }

  // Reads and compares what was added, and brings it into its place.
  void finish() {
    source_.source_->read_ranges(wanted_);
    for (const auto& [block, bytes] : whole_) source_.check(block, bytes);
    for (auto& [block, bytes] : around_) source_.check(block, *bytes);
    for (const Part& part : parts_)
      std::memcpy(part.out.data(), around_.at(part.block)->data() + part.within, part.out.size());
    for (auto& [block, bytes] : around_) recent_blocks.keep(source_.id_, block, std::move(bytes));
    wanted_.clear();
    whole_.clear();
    parts_.clear();
    around_.clear();
  }

 private:
  static constexpr std::size_t kMostAround = 16;  // blocks that are in memory for their parts
  struct Part {
    std::uint64_t block, within;
    MutableByteView out;
  };

  [[nodiscard]] std::uint64_t begin_of(std::uint64_t block) const {
    return source_.origin_ + block * kDigestBlock;
  }
  [[nodiscard]] std::uint64_t size_of(std::uint64_t block) const {
    return std::min(kDigestBlock, source_.size() - begin_of(block));
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
    want(begin_of(block), out);
    whole_.emplace_back(block, out);
  }

  void add_part(std::uint64_t block, std::uint64_t within, MutableByteView out) {
    if (const auto recent = recent_blocks.find(source_.id_, block)) {
      std::memcpy(out.data(), recent->data() + within, out.size());
      return;
    }
    // Also of one that was good before: every answer may be damaged.
    if (!around_.contains(block)) {
      auto& bytes = around_[block];
      bytes = std::make_shared<std::vector<std::byte>>(static_cast<std::size_t>(size_of(block)));
      want(begin_of(block), *bytes);
    }
    parts_.push_back({block, within, out});
  }

  const CheckedSource& source_;
  std::vector<ReadRange> wanted_;
  std::vector<std::pair<std::uint64_t, MutableByteView>> whole_;
  // Whole blocks of which parts are wanted.
  std::map<std::uint64_t, std::shared_ptr<std::vector<std::byte>>> around_;
  std::vector<Part> parts_;
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
  if (source_->request_cost() > kNearRequest) return read_far(ranges);
  std::vector<ReadRange> good;
  for (const ReadRange& range : ranges) {
    if (is_good(range)) {
      good.push_back(range);
    } else {
      read_at(range.offset, range.out);
    }
  }
  source_->read_ranges(good);
}

void CheckedSource::read_part(std::uint64_t block, std::uint64_t within,
                              MutableByteView out) const {
  const std::uint64_t begin = origin_ + block * kDigestBlock;
  LastBlock& last = last_block();
  if (last.source != id_ || last.block != block) {
    if (good_[block].load(std::memory_order_relaxed)) {
      source_->read_at(begin + within, out);
      return;
    }
    last.source = 0;  // until the bytes are found good
    last.bytes.resize(static_cast<std::size_t>(std::min(kDigestBlock, size() - begin)));
    source_->read_at(begin, last.bytes);
    check(block, last.bytes);
    last.source = id_;
    last.block = block;
  }
  std::memcpy(out.data(), last.bytes.data() + within, out.size());
}

}  // namespace tessera
