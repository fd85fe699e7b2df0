// Reads slices of a tensor from the pieces that a checkpoint holds: the executor of copy plans.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <unordered_set>
#include <vector>

#include "tessera/checkpoint.h"
#include "tessera/layout.h"
#include "tessera/value.h"

namespace tessera {

// Counters of one job, added to by several threads.
struct IoCounters {
  void add(const IoReport& part);
  [[nodiscard]] IoReport report() const;

 private:
  mutable std::mutex mutex_;
  IoReport total_;  // guarded by mutex_
};

// Storages whose checksums were compared in one job. Several tensors may be views of one storage;
// it is read whole for its checksum once. Storages must outlive this; used by several threads.
class CheckedStorages {
 public:
  // Whether the caller is the first with this storage, and has to check it.
  [[nodiscard]] bool claim(const Storage& storage);

 private:
  std::mutex mutex_;
  std::unordered_set<const Storage*> claimed_;  // guarded by mutex_
};

// Throws `limit` for a tensor that unfolds a few stored bytes to more than any disk or memory would
// take: a view whose strides are 0, of 16 GiB and of a thousand times its storage. Describing it
// costs nothing, reading it would not end.
void require_bounded(const Tensor& tensor, const std::string& name);

// One tensor's pieces made ready to read. A reader belongs to one thread.
//
// Elements are asked for by target position; bytes of a piece that are read from its first to its
// last in ascending order are followed by a running CRC-32, which is compared with the recorded one
// when the last byte has passed: a difference is `corrupt`. Bytes that no such check covers are
// counted.
class TensorReader {
 public:
  // `tensor` must outlive the reader and be bounded; its pieces lie in sources or in memory. `name`
  // is for errors.
  TensorReader(const Tensor& tensor, std::string name);
  ~TensorReader();
  TensorReader(const TensorReader&) = delete;
  TensorReader& operator=(const TensorReader&) = delete;

  // Fills `out`, the elements [begin, begin + count) of `target` in row-major order (element size
  // of the tensor's dtype). Ascending calls for one target keep the CRC running. Elements that are
  // stored as another type are converted.
  void read(const Slice& target, std::int64_t begin, std::int64_t count, std::byte* out);

  // Reads once more, and checks, every storage whose recorded CRC-32 the reads so far could not
  // follow: strided views, views of a part. Those that `done` knows are left to who claimed them.
  // Afterwards nothing with a checksum is unchecked.
  void check_rest(CheckedStorages& done);

  // What was read since construction.
  [[nodiscard]] IoReport report() const;

 private:
  struct Source;
  void read_stored(const Slice& target, std::int64_t begin, std::int64_t count, std::byte* out);
  void prepare_plan(const Slice& target);
  Source& source(std::size_t piece);
  void read_group(Source& source, std::span<const Copy> group, std::int64_t begin, std::byte* out);
  void read_strided(Source& source, const Copy& copy, std::byte* out);

  const Tensor& tensor_;
  std::string name_;                              // the tensor's key
  DType stored_;                                  // type of the elements in the pieces
  std::size_t element_;                           // bytes of one
  std::vector<Slice> slices_;                     // of the pieces
  std::vector<std::unique_ptr<Source>> sources_;  // by piece; null: not used yet
  std::optional<Slice> planned_;                  // the target that plan_ is for
  std::vector<Copy> plan_;                        // sorted by position in the target
  std::vector<std::byte> scratch_;                // for runs that are read together
  std::vector<std::byte> unconverted_;            // elements as they are stored
  IoReport report_;
};

// Whether the storage has a checksum to compare with. A recorded 0 means that the writer did not
// compute one.
[[nodiscard]] bool has_crc(const Storage& storage);

// Reads all bytes of a raw storage and compares their CRC-32 with the recorded one (`corrupt` on a
// difference). Returns whether there was one to compare with.
bool check_storage(const Storage& storage, const std::string& name);

// The tensor inside an encoded DCP item (F-03b), or `piece` itself when its storage is raw: a piece
// whose storage is raw and whose strides are known. Throws `corrupt` when the item holds another
// shape or dtype than `tensor` says, or is no archive.
[[nodiscard]] Piece decoded_piece(const Tensor& tensor, const Piece& piece,
                                  const std::string& name);

}  // namespace tessera
