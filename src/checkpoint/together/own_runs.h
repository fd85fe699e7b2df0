// The runs of a tensor that a rank writes into a file, or digests.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/read/meter.h"
#include "checkpoint/read/reader.h"
#include "checkpoint/together/file_sums.h"
#include "tessera/io.h"
#include "tessera/value.h"

namespace tessera {

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
