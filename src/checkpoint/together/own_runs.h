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

// Writes what `boxes`, which this rank holds, have in common with `slice`, at its place in the row.
// Needs one window of memory. `reader` is of the tensor of `shape` and `dtype`.
[[nodiscard]] WrittenSum write_runs(const Tensor& tensor, TensorReader& reader,
                                    const std::vector<Box>& boxes, const Slice& slice,
                                    const RunTarget& target, Meter* meter);

}  // namespace tessera
