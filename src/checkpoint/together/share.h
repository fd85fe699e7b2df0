// What ranks have written into the records of archives that they fill together: how many bytes,
// and the terms of their CRC-32.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "checkpoint/read/meter.h"
#include "checkpoint/read/reader.h"
#include "checkpoint/save/planned_leaf.h"
#include "comm/message.h"
#include "tessera/comm.h"
#include "tessera/io.h"
#include "tessera/layout.h"
#include "tessera/leaf.h"
#include "tessera/value.h"

namespace tessera {

struct WrittenSum {
  std::uint64_t bytes = 0;
  std::uint32_t terms = 0;  // of base/crc32.h

  void add(const WrittenSum& other) {
    bytes += other.bytes;
    terms ^= other.terms;
  }
};
auto fields(FieldsOf<WrittenSum> auto& sum) {
  return std::tie(sum.bytes, sum.terms);
}

// The sums of rows, by number of the file and of the record in it; both are the same on all ranks.
using FileSums = std::map<std::pair<std::uint32_t, std::uint32_t>, WrittenSum>;
void join_sums(FileSums& all, const FileSums& more);

// The sums of elements that this rank has written, by tensor: as bytes of the tensor in row-major
// order.
using TensorSums = std::unordered_map<const Leaf*, WrittenSum>;

// The tensors of a state that N ranks save, and what each rank holds of them.

// One of them, as this rank has it.
struct PlacedTensor {
  const Leaf* leaf = nullptr;
  Placement placement;
};

class PlacedTensors {
 public:
  // `leaves` are tensors and outlive this. Throws `unsupported` for one of which ranks cannot
  // compute what the others hold, `invalid_argument` for a piece outside of its storage.
  PlacedTensors(const std::vector<const Leaf*>& leaves, int rank, int ranks);

  [[nodiscard]] const std::vector<PlacedTensor>& all() const { return all_; }
  [[nodiscard]] const Placement& of(const Leaf& leaf) const {
    return all_[by_leaf_.at(&leaf)].placement;
  }
  // A digest of names, types, shapes and placements.
  [[nodiscard]] std::uint64_t digest() const { return digest_; }

 private:
  std::vector<PlacedTensor> all_;
  std::unordered_map<const Leaf*, std::size_t> by_leaf_;
  std::uint64_t digest_ = 0;
};

// Who of N ranks writes what of a tensor. Pure integers: every rank computes it for all.

struct Sharer {
  int rank = 0;
  int ranks = 1;
  // Whose file it is: what this rank holds of a tensor it writes itself. -1: the file is
  // everybody's, and ranks that hold the same share it.
  int owner = -1;
};

// The boxes of a tensor with this placement that the rank writes into a file that gets all of it.
// The boxes of all ranks together have every element once. `fits` holds (layout/boxes.h).
[[nodiscard]] std::vector<Box> boxes_to_write(const Placement& placement, const Shape& shape,
                                              const Sharer& sharer);

// The ranks that hold the same part as `rank`: how many there are, and which of them it is.
struct Holders {
  int count = 1;
  int index = 0;
};
[[nodiscard]] Holders holders_of(const Placement& placement, int rank, int ranks);

// The runs of a tensor that a rank writes into a file, or digests.

// A row of bytes in a file that elements of a tensor belong to.
struct RunTarget {
  ByteSink* sink = nullptr;  // null: nothing is written, only summed
  std::uint64_t offset = 0;  // of the row in the sink
  std::uint64_t size = 0;    // of the row, which the sum is of
  std::uint64_t begin = 0;   // where in the row the elements of the slice begin
};

// The same elements as bytes of the row, and as bytes of the tensor in row-major order.
struct RunSums {
  WrittenSum row;
  WrittenSum tensor;  // only of boxes that are one run of the tensor
};

// Writes what `boxes`, which this rank holds, have in common with `slice`, at its place in the row.
// Needs one window of memory at most. `reader` is of the tensor of `shape` and `dtype`. Each byte
// is summed once, for both.
[[nodiscard]] RunSums write_runs(const Tensor& tensor, TensorReader& reader,
                                 const std::vector<Box>& boxes, const Slice& slice,
                                 const RunTarget& target, Meter* meter);

}  // namespace tessera
