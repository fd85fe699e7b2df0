// What ranks have written into the records of archives that they fill together: how many bytes,
// and the terms of their CRC-32.
#pragma once

#include <cstdint>
#include <map>
#include <unordered_map>
#include <utility>

#include "tessera/comm.h"
#include "tessera/leaf.h"

namespace tessera {

struct WrittenSum {
  std::uint64_t bytes = 0;
  std::uint32_t terms = 0;  // of base/crc32.h

  void add(const WrittenSum& other) {
    bytes += other.bytes;
    terms ^= other.terms;
  }
};

// By number of the file and of the record in it; both are the same on all ranks.
using FileSums = std::map<std::pair<std::uint32_t, std::uint32_t>, WrittenSum>;

// Of elements that this rank has written, by tensor: as bytes of the tensor in row-major order.
using TensorSums = std::unordered_map<const Leaf*, WrittenSum>;

[[nodiscard]] Bytes encode_sums(const FileSums& sums);
[[nodiscard]] FileSums decode_sums(const Bytes& message);
[[nodiscard]] Bytes combine_sums(const Bytes& left, const Bytes& right);

}  // namespace tessera
