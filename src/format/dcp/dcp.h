// PyTorch distributed checkpoints (checkpoint-rows F-03): the `.metadata` pickle, decoded and
// encoded.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "format/dcp/chunks.h"
#include "tessera/io.h"
#include "tessera/layout.h"
#include "tessera/leaf.h"
#include "tessera/value.h"

namespace tessera::dcp {

// What an entry is, without what it consists of.
struct EntryHead {
  std::string name;          // fqn: the flattened, dotted key
  std::optional<Path> path;  // planner_data's path, when it has one
  bool is_tensor = false;
  DType dtype = DType::float32;  // tensors
  Shape shape;
  bool requires_grad = false;
};

struct Entry : EntryHead {
  Chunks chunks;  // tensors
  Item item;      // bytes items
};

// What wrote a checkpoint, and where.
struct Origin {
  std::string version;        // "1.0.0"; empty: older torch
  std::string checkpoint_id;  // storage_meta; empty: none
  std::string save_id;
  bool has_planner_data = true;
};

struct Metadata : Origin {
  std::vector<Entry> entries;         // in `.metadata` order
  std::vector<std::string> warnings;  // what decode() passed over
};

// What a `.metadata` is to say, where that is computed while it is written. Every function may be
// called several times and answers the same each time.
class MetadataSource {
 public:
  using Numbers = std::span<const std::int64_t>;
  using ChunkVisitor = std::function<void(Numbers offsets, Numbers sizes)>;
  using ItemVisitor = std::function<void(Numbers offsets, const ItemView& item)>;

  virtual ~MetadataSource() = default;
  [[nodiscard]] virtual const Origin& origin() const = 0;
  [[nodiscard]] virtual std::size_t entry_count() const = 0;
  // Entries are numbered in `.metadata` order. Valid as long as the source is.
  [[nodiscard]] virtual const EntryHead& head(std::size_t entry) const = 0;
  // Calls `visit` with the box of each chunk of a tensor. What `visit` is given need not outlive
  // the call; what it throws leaves this function.
  virtual void for_each_chunk(std::size_t entry, const ChunkVisitor& visit) const = 0;
  // The same with the item of each chunk, in the same order, and where the chunk begins; or with
  // the only item of an object, which begins nowhere.
  virtual void for_each_item(std::size_t entry, const ItemVisitor& visit) const = 0;
};
// What `metadata`, which outlives it, says.
[[nodiscard]] std::unique_ptr<MetadataSource> source_of(const Metadata& metadata);

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

// Writes a `.metadata` that PyTorch loads (docs/formats/dcp.md). `write` takes it in pieces of
// about 1 MiB, each behind the one before, and what it throws leaves encode(). Needs memory for one
// piece and for every entry's name, never for chunks. Throws `conflict` when two entries have one
// name, `corrupt` for a text that is not UTF-8, `limit` for numbers over 63 bits, and
// `invalid_argument` when an entry has not as many items as chunks. After an error the pieces are
// of no use.
void encode(const MetadataSource& source, const std::function<void(ByteView bytes)>& write);
// The same bytes as a whole.
[[nodiscard]] std::vector<std::byte> encode(const Metadata& metadata);

}  // namespace tessera::dcp
