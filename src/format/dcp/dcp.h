// PyTorch distributed checkpoints (checkpoint-rows F-03): the `.metadata` pickle, decoded and
// encoded.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/dtype.h"
#include "tessera/io.h"
#include "tessera/layout.h"
#include "tessera/leaf.h"
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
  std::vector<std::string> warnings;  // what decode() passed over
};

// Throws `corrupt` with the entry's name when items, chunks and entries do not fit together: a box
// outside its tensor, two items for a chunk; `incomplete` for a chunk without an item, `unsafe` for
// a path that leaves the directory, `unsupported` for classes and dtypes that are not known. An
// item without an entry is a warning. Coverage is not checked here.
[[nodiscard]] Metadata decode(ByteView bytes);

// What the ranks of a save without collectives (checkpoint-rows P-04) left together: entries in
// order of first appearance, every chunk once, values and replicas from the lowest rank that has
// them. `ranks` must not be empty. Throws `corrupt` when two ranks differ about a name's kind,
// shape, dtype or chunks.
[[nodiscard]] Metadata merge(std::vector<Metadata> ranks);

// A `.metadata` that PyTorch loads (protocol 4).
[[nodiscard]] std::vector<std::byte> encode(const Metadata& metadata);

}  // namespace tessera::dcp
