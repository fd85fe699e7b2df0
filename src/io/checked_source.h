// One digest per 1 MiB block of an object, made while it is written in any order.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "base/recent_blocks.h"
#include "io/source.h"
#include "tessera/io.h"

namespace tessera {

inline constexpr std::uint64_t kDigestBlock = 1 << 20;  // bytes; the last block may be shorter
using Digests = std::vector<std::uint64_t>;             // of blocks, in the object's order

[[nodiscard]] constexpr std::uint64_t digest_blocks(std::uint64_t size) {
  return size / kDigestBlock + (size % kDigestBlock == 0 ? 0 : 1);
}

// Follows what is written. Bytes are digested as they come, by the thread that brings them: whole
// blocks at once, a block that comes in parts by a running digest. Only parts that come before
// their predecessors (an item's data before its header) are kept until the gap is closed.
class BlockDigests {
 public:
  // Bytes [offset, offset + bytes.size()) have this content. From any thread; each byte once.
  void add(std::uint64_t offset, ByteView bytes);
  // All digests of an object of `size` bytes, of which those never added are zero. Once, after the
  // last add.
  [[nodiscard]] Digests finish(std::uint64_t size);

 private:
  struct Open;
  void add_part(std::uint64_t block, std::uint64_t within, ByteView bytes);
  void store(std::uint64_t block, std::uint64_t digest);

  std::mutex mutex_;                                     // guards everything below
  std::map<std::uint64_t, std::shared_ptr<Open>> open_;  // blocks that came in part
  Digests done_;                                         // by block; 0 where not known yet
};

// A sink that digests what goes through it. Block 0 begins at byte `origin` of the object; bytes
// before it are not digested.
class DigestSink final : public ByteSink {
 public:
  explicit DigestSink(std::unique_ptr<ByteSink> sink, std::uint64_t origin = 0)
      : sink_(std::move(sink)), origin_(origin) {}

  void write_at(std::uint64_t offset, ByteView bytes) override;
  void commit() override { sink_->commit(); }
  [[nodiscard]] const std::string& name() const override { return sink_->name(); }

  // Of everything from `origin` to the last byte written. Once, after the last such write.
  [[nodiscard]] Digests digests();
  // One past the last byte written.
  [[nodiscard]] std::uint64_t size();

 private:
  std::unique_ptr<ByteSink> sink_;
  std::uint64_t origin_;
  BlockDigests blocks_;
  std::mutex mutex_;
  std::uint64_t end_ = 0;  // guarded by mutex_
};

// A source that compares what it reads with recorded digests.

// Reads are rounded out to blocks of 1 MiB and a block's digest is compared before its bytes are
// given out: a difference is `corrupt` at the block's offset. What a thread needs of a block next
// is kept, so reading onwards reads and digests each block once; near, a part of a block that was
// found good before is read without its rest. Threads of one job that want parts of one block read
// it once (SharedBlocks). Far away the last 32 blocks of which parts were read stay in memory, of
// all sources together. What differs is read once more before it is `corrupt`.
//
// Both would keep their blocks in one place of the thread, so one around another is
// `invalid_argument`.
class CheckedSource final : public ForwardingSource {
 public:
  // Block 0 begins at byte `origin`; bytes before it are given out unchecked. Throws `incomplete`
  // or `corrupt` when the digests are not those of an object of this size.
  CheckedSource(std::shared_ptr<const ByteSource> source, Digests digests,
                std::uint64_t origin = 0);

  using ForwardingSource::inner;  // whose digests these are
  [[nodiscard]] const Digests& digests() const noexcept { return digests_; }
  [[nodiscard]] std::uint64_t origin() const noexcept { return origin_; }
  void read_at(std::uint64_t offset, MutableByteView out) const override;
  void read_ranges(std::span<const ReadRange> ranges) const override;
  [[nodiscard]] bool checked() const override { return true; }

 private:
  class Batch;
  void read_far(std::span<const ReadRange> ranges) const;
  void check(std::uint64_t block, MutableByteView bytes) const;
  [[nodiscard]] bool is_good(const ReadRange& range) const;
  void read_whole(std::uint64_t block, MutableByteView out) const;
  void read_part(std::uint64_t block, std::uint64_t within, MutableByteView out) const;
  // A whole block that was found good, in memory that `blocks` gives.
  [[nodiscard]] RecentBlocks::Bytes read_block(std::uint64_t block, RecentBlocks& blocks) const;
  [[nodiscard]] RecentBlocks::Key key(std::uint64_t block) const { return {id_, block}; }
  [[nodiscard]] std::uint64_t begin_of(std::uint64_t block) const {
    return origin_ + block * kDigestBlock;
  }
  [[nodiscard]] std::uint64_t size_of(std::uint64_t block) const {
    return std::min(kDigestBlock, size() - begin_of(block));
  }

  Digests digests_;
  std::uint64_t origin_;
  std::uint64_t id_;  // of this source in the threads' caches; never used twice
  mutable std::vector<std::atomic<bool>> good_;  // by block: was read and found good
};

}  // namespace tessera
