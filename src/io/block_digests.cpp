#include "io/block_digests.h"

#include <algorithm>
#include <utility>

#include "base/checked.h"
#include "base/digest.h"

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
  follow(offset, bytes);
}

void DigestSink::keep_at(std::uint64_t offset, ByteView bytes) {
  sink_->keep_at(offset, bytes);
  follow(offset, bytes);
}

void DigestSink::follow(std::uint64_t offset, ByteView bytes) {
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

}  // namespace tessera
