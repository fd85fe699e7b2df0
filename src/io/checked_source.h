// A source that compares what it reads with recorded digests.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/recent_blocks.h"
#include "io/block_digests.h"
#include "tessera/io.h"

namespace tessera {

// Reads are rounded out to blocks of 1 MiB and a block's digest is compared before its bytes are
// given out: a difference is `corrupt` at the block's offset. What a thread needs of a block next
// is kept, so reading onwards reads and digests each block once; near, a part of a block that was
// found good before is read without its rest. Threads of one job that want parts of one block read
// it once (SharedBlocks). Far away the last 32 blocks of which parts were read stay in memory, of
// all sources together. What differs is read once more before it is `corrupt`.
//
// Both would keep their blocks in one place of the thread, so one around another is
// `invalid_argument`.
class CheckedSource final : public ByteSource {
 public:
  // Block 0 begins at byte `origin`; bytes before it are given out unchecked. Throws `incomplete`
  // or `corrupt` when the digests are not those of an object of this size.
  CheckedSource(std::shared_ptr<const ByteSource> source, Digests digests,
                std::uint64_t origin = 0);

  [[nodiscard]] std::uint64_t size() const override { return source_->size(); }
  void read_at(std::uint64_t offset, MutableByteView out) const override;
  void read_ranges(std::span<const ReadRange> ranges) const override;
  [[nodiscard]] const std::string& name() const override { return source_->name(); }
  [[nodiscard]] std::string version() const override { return source_->version(); }
  [[nodiscard]] std::uint64_t request_cost() const override { return source_->request_cost(); }
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

  std::shared_ptr<const ByteSource> source_;
  Digests digests_;
  std::uint64_t origin_;
  std::uint64_t id_;  // of this source in the threads' caches; never used twice
  mutable std::vector<std::atomic<bool>> good_;  // by block: was read and found good
};

}  // namespace tessera
