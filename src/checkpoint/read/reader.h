// Reads slices of a tensor from the pieces that a checkpoint holds: the executor of copy plans.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "base/log.h"
#include "checkpoint/read/cast.h"
#include "checkpoint/read/gather.h"
#include "checkpoint/read/storage_checks.h"
#include "layout/plan.h"
#include "tessera/checkpoint.h"
#include "tessera/layout.h"
#include "tessera/value.h"

#pragma GCC visibility push(default)  // the command links it, see cmake/TesseraShared.cmake
namespace tessera {

// Counters of one job, added to by several threads. Made by the thread that does the job.
struct IoCounters {
  void add(const IoReport& part);
  [[nodiscard]] IoReport report() const;

 private:
  TrafficCount traffic_;
  mutable std::mutex mutex_;
  IoReport total_;  // guarded by mutex_
};

// Throws `limit` for a tensor that unfolds a few stored bytes to more than any disk or memory would
// take: a view whose strides are 0, of 16 GiB and of a thousand times its storage. Describing it
// costs nothing, reading it would not end.
void require_bounded(const Tensor& tensor, const std::string& name);

// One tensor's pieces made ready to read. A reader belongs to one thread.
//
// Elements are asked for by target position; a running CRC-32 follows the bytes of a piece as they
// are read in ascending order, and is compared with the recorded one when all have passed: a
// difference is `corrupt`. `hand_over` gives the CRC-32 of storages that are read in part to the
// job. Bytes that no such check covers are counted.
class TensorReader {
 public:
  // Bytes of elements that are brought into order ahead of what is asked for.
  static constexpr std::size_t kTileBytes = 16 << 20;

  // `tensor` must outlive the reader and be bounded; its pieces lie in sources or in memory. `name`
  // is for errors. Elements that lie in another order in a file than in the tensor, as those of a
  // transposed one do, are put into order by tiles of `tile_bytes`: each goes over the file once,
  // so more memory means fewer and longer reads.
  TensorReader(const Tensor& tensor, std::string name, std::size_t tile_bytes = kTileBytes);
  ~TensorReader();
  TensorReader(const TensorReader&) = delete;
  TensorReader& operator=(const TensorReader&) = delete;

  // Fills `out`, the elements [begin, begin + count) of `target` in row-major order (element size
  // of the tensor's dtype). Ascending calls for one target keep the CRC running. Elements that are
  // stored as another type are converted.
  void read(const Slice& target, std::int64_t begin, std::int64_t count, std::byte* out);

  // The same elements where they are, if they lie one behind the other in memory as they are
  // wanted; else nothing. Valid as long as that memory.
  [[nodiscard]] ByteView view(const Slice& target, std::int64_t begin, std::int64_t count);

  // Leaves the checksums of storages that were read in part, or out of order, to `checks`; they
  // count as checked from now on. To be called after the last read.
  void hand_over(StorageChecks& checks);

  // The reads since construction.
  [[nodiscard]] IoReport report() const;
  // What became of elements that are stored as another type.
  [[nodiscard]] CastLoss loss() const noexcept { return loss_; }

 private:
  struct Source;
  // Elements of the planned target that have been put into order.
  struct Tile {
    std::int64_t begin = 0;
    std::int64_t end = 0;
    std::unique_ptr<std::byte[]> bytes;
  };
  void read_stored(const Slice& target, std::int64_t begin, std::int64_t count, std::byte* out);
  std::vector<Copy> window_of(std::int64_t begin, std::int64_t count) const;
  void read_window(std::int64_t begin, std::int64_t count, std::byte* out);
  void read_tiled(std::int64_t begin, std::int64_t count, std::byte* out);
  void fill_tile(std::int64_t begin, std::int64_t end);
  [[nodiscard]] std::int64_t tile_end(std::int64_t begin) const;
  void prepare_plan(const Slice& target);
  Source& source(std::size_t piece);
  void read_group(Source& source, std::span<const Copy> group, std::int64_t begin, std::byte* out);
  void read_device_group(Source& source, std::span<const Copy> group, std::int64_t begin,
                         std::byte* out);
  void read_run(Source& source, std::uint64_t from, MutableByteView out);
  void read_dense(Source& source, std::span<const Copy> copies, std::int64_t begin, std::byte* out);
  void read_copies(Source& source, std::span<const Copy> copies, std::int64_t begin,
                   std::byte* out);
  void read_strided(Source& source, std::span<const Copy> copies, std::int64_t begin,
                    std::int64_t count, std::byte* out);
  void read_box(Source& source, const Box& box, const Shape& strides, std::int64_t first,
                std::byte* out);
  [[nodiscard]] bool takes_all_common(std::size_t piece) const;

  const Tensor& tensor_;
  std::string name_;                              // the tensor's key
  DType stored_;                                  // type of the elements in the pieces
  std::size_t element_;                           // bytes of one
  std::vector<Slice> slices_;                     // of the pieces
  std::vector<std::unique_ptr<Source>> sources_;  // by piece; null: not used yet
  std::optional<Slice> planned_;                  // the target that plan_ is for
  std::vector<Copy> plan_;                        // sorted by position in the target
  std::vector<std::int64_t> gaps_;                // by piece: the longest that is read over
  std::vector<std::int64_t> taken_;               // by piece: elements that plan_ takes from it
  std::size_t tile_bytes_;
  bool tiled_ = false;  // the planned target's elements need tiles
  Tile tile_;
  std::vector<std::byte> scratch_;  // for runs that are read together
  GatherScratch gather_;
  std::vector<std::byte> unconverted_;  // elements as they are stored
  CastLoss loss_;
  IoReport report_;
};

// A digest of the elements of `slice`, in row-major order.
[[nodiscard]] std::uint64_t digest_of_slice(const Tensor& tensor, const std::string& name,
                                            const Slice& slice);

// The tensor inside an encoded DCP item (checkpoint-rows F-03b), or `piece` itself when its storage
// is raw: a piece whose storage is raw and whose strides are known. Throws `corrupt` when the item
// holds another shape or dtype than `tensor` says, or is no archive.
[[nodiscard]] Piece decoded_piece(const Tensor& tensor, const Piece& piece,
                                  const std::string& name);

}  // namespace tessera
#pragma GCC visibility pop
