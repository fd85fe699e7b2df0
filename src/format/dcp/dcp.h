// PyTorch distributed checkpoints (spec F-03): the `.metadata` pickle, decoded and encoded.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/dtype.h"
#include "tessera/io.h"
#include "tessera/layout.h"
#include "tessera/value.h"

namespace tessera::dcp {

// Where one item is: a byte range of a data file (StorageInfo).
struct Item {
  std::string path;  // relative to the checkpoint's directory; never leaves it
  std::uint64_t offset = 0;
  std::uint64_t length = 0;
  std::vector<std::string> transforms;  // stream extensions, outermost first ("stream.zstd/1")
};

struct Chunk {
  Box box;
  Item item;
};

struct Entry {
  std::string name;          // fqn: the flattened, dotted key
  std::optional<Path> path;  // planner_data's path, when it has one
  bool is_tensor = false;
  DType dtype = DType::float32;  // tensors
  Shape shape;
  bool requires_grad = false;
  std::vector<Chunk> chunks;  // tensors: in `.metadata` order
  Item item;                  // bytes items
};

struct Metadata {
  std::vector<Entry> entries;  // in `.metadata` order
  std::string version;         // "1.0.0"; empty: older torch
  std::string checkpoint_id;   // storage_meta; empty: none
  std::string save_id;
  bool has_planner_data = true;
};

// Throws `corrupt` with the entry's name when items, chunks and entries do not fit together: an
// item without an entry, a chunk without an item, a box outside its tensor, a path that leaves the
// directory
// (`unsafe`). `unsupported` for classes and dtypes that are not known. Coverage is not checked
// here.
[[nodiscard]] Metadata decode(ByteView bytes);

// A `.metadata` that PyTorch loads (protocol 4).
[[nodiscard]] std::vector<std::byte> encode(const Metadata& metadata);

}  // namespace tessera::dcp
