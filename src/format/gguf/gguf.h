// GGUF, the format of llama.cpp (docs/formats/gguf.md): key-values, then the names, shapes and
// places of tensors, then their data.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "format/gguf/blocks.h"
#include "tessera/io.h"
#include "tessera/layout.h"
#include "tessera/value.h"

namespace tessera::gguf {

inline constexpr std::string_view kMagic = "GGUF";

// The dicts of a checkpoint in which a file's key-values lie, and the names of the types of its
// quantized tensors, by the tensors' names.
inline constexpr std::string_view kValuesDict = "gguf";
inline constexpr std::string_view kTypesDict = "gguf_types";

struct Entry {
  std::string name;
  const ElementType* type = nullptr;
  Shape shape;              // of elements, outermost first: the file has the innermost first
  std::uint64_t begin = 0;  // bytes from the start of the file
  std::uint64_t end = 0;
};

struct Header {
  std::vector<std::pair<std::string, Value>> values;  // in the file's order
  std::vector<Entry> entries;                         // in the order of their data
  std::uint64_t trailing = 0;  // bytes behind the last tensor and its padding
};

inline constexpr std::uint64_t kHeaderLimit = 100'000'000;        // bytes before the data
inline constexpr std::uint64_t kMostEntries = 1'000'000;          // tensors, and key-values
inline constexpr std::uint64_t kMostValues = 1U << 23U;           // elements of all arrays together
inline constexpr std::uint64_t kMostAlignment = 16U << 20U;       // bytes
inline constexpr std::uint64_t kMostNameBytes = (1U << 16U) - 1;  // of a key or a tensor's name
inline constexpr std::uint32_t kMostDimensions = 4;
inline constexpr int kMostNesting = 8;  // arrays inside one another

// Reads and checks all before the data. Values are Python's: numbers, booleans, strings, lists;
// an array of u8, and a string that is not UTF-8, is bytes. Tensors tile the data section, in any
// order, each padded to the alignment; no key and no tensor's name is there twice. Throws
// `incomplete` for a file that is cut short, `limit` for what exceeds the caps above and for sizes
// that overflow, `unsupported` for other versions, for big-endian files and for types that it does
// not know, `corrupt` for everything else.
[[nodiscard]] Header read_header(const ByteSource& source, std::uint64_t limit = kHeaderLimit);

}  // namespace tessera::gguf
