// How an object is cut into the parts of an upload, and what is kept of a part until it is sent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "storage/s3/bucket.h"
#include "tessera/io.h"
#include "tessera/storage.h"

namespace tessera::s3 {

inline constexpr std::uint64_t kMiB = 1U << 20U;
// What S3 sets: parts of 5 MiB to 5 GiB, 10,000 of them, the last of which is Bucket::mark's.
inline constexpr std::uint64_t kLargestPart = 5120 * kMiB;
inline constexpr std::uint64_t kLargestObject = 5120 * 1024 * kMiB;
inline constexpr int kMostParts = 9'999;
inline constexpr std::uint64_t kSmallestPart = 8 * kMiB;  // of ours, but for the last

struct Part {
  int number = 0;                    // from 1 on
  std::uint64_t begin = 0, end = 0;  // in the object; the last one may end earlier
};

// The places where parts begin follow from what the writer expected, not from what it does, so that
// threads which write in any order agree on them. Parts have one size up to the expected end or,
// where none is known, up to the 1,000th; behind it the size doubles every 1,000 parts.
class PartPlan {
 public:
  // `size_hint` 0: unknown; kMostParts then reach the largest object. Throws `limit` for more.
  explicit PartPlan(std::uint64_t size_hint);
  // The part that has the byte at `offset`. Throws `limit` where no part can reach.
  [[nodiscard]] Part part_at(std::uint64_t offset) const;

 private:
  std::uint64_t size_;  // of the first `even_` parts
  std::uint64_t even_;
};

// Not zeroed when it is made: a part of which little is written takes little memory.
class PartBuffer {
 public:
  explicit PartBuffer(std::size_t size)
      : size_(size), bytes_(std::make_unique_for_overwrite<std::byte[]>(size)) {}

  [[nodiscard]] std::size_t size() const { return size_; }
  // Several threads may copy at once; the rest is for one.
  void copy(std::size_t offset, ByteView bytes);
  void note(std::size_t offset, std::size_t size);  // that so many bytes were copied
  [[nodiscard]] bool is_full() const;
  // The first `size` bytes; those that nobody wrote become 0.
  [[nodiscard]] ByteView filled(std::size_t size);

 private:
  const std::size_t size_;
  std::unique_ptr<std::byte[]> bytes_;
  std::map<std::size_t, std::size_t> written_;  // begin and end of runs that do not touch
};

// Writes one object of a bucket: by one PUT if it is small, else by an upload in parts.

// Bytes come in any order and from several threads; a part is sent by the thread that completes it,
// straight from the caller's memory where one write has all of it. Kept in memory are the parts of
// which some bytes are there and some are not: one for a writer that goes from front to back, and
// as many as a writer jumps about in. An object that does not reach behind its first part is one
// PUT.
//
// `condition` is that of the request that makes the object visible; if it does not hold, commit is
// `already_exists`, or of a version `conflict`. If its answer is
// lost, or is that somebody wrote the object, or that there is no such upload, the object itself
// tells whether it is this sink's. The server may ask to write the object again (409, another
// writer at the same moment); the bytes are gone by then, so that is `conflict` once some pauses
// were no help. After an error all later calls throw it. Destroyed without commit it aborts the
// upload; what an abort that fails leaves is an unfinished upload of this key
// (Bucket::list_uploads).
[[nodiscard]] std::unique_ptr<ByteSink> s3_sink(std::shared_ptr<Bucket> bucket, std::string key,
                                                Condition condition, std::uint64_t size_hint);

}  // namespace tessera::s3
