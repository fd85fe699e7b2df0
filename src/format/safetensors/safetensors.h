// safetensors (checkpoint-rows F-06, F-07): a JSON header of names, dtypes, shapes and offsets,
// then raw data.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/io.h"
#include "tessera/layout.h"

namespace tessera::safetensors {

struct Entry {
  std::string name;  // any UTF-8
  DType dtype = DType::float32;
  Shape shape;  // of float4_e2m1fn_x2: in bytes, two values each; the file counts values
  std::uint64_t begin = 0;  // bytes from the start of the data section
  std::uint64_t end = 0;
};

struct Header {
  std::vector<Entry> entries;                   // in file order of their data
  std::map<std::string, std::string> metadata;  // __metadata__
  std::uint64_t data_offset = 0;                // of the data section in the file
  std::uint64_t trailing = 0;                   // bytes behind the last tensor
};

inline constexpr std::uint64_t kHeaderLimit = 100'000'000;  // bytes, as in the reference library
inline constexpr std::size_t kMaxDimensions = 64;

// Reads and checks the header: entries tile the data section without hole or overlap, sizes agree
// with dtype and shape, the file ends where the data ends, names and fields do not repeat. Fields
// that the format does not know are skipped. Throws `incomplete` when the file is cut short,
// `limit` for a larger header or more dimensions, `unsupported` for an unknown dtype, `corrupt` for
// everything else. With `may_trail` the file may go on behind its data.
[[nodiscard]] Header read_header(const ByteSource& source, std::uint64_t limit = kHeaderLimit,
                                 bool may_trail = false);

// Lays the tensors out as the reference library does (by its order of dtypes, widest first, then by
// name), sorting `entries` and filling begin, end and data_offset, and returns the bytes from 0 to
// data_offset. Throws `invalid_argument` for names that repeat, are reserved or are not UTF-8,
// `unsupported` for a dtype that the format lacks, `limit` for a header that readers would refuse.
[[nodiscard]] std::vector<std::byte> encode_header(Header& header);

}  // namespace tessera::safetensors
