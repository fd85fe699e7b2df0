// Names of the classes in a `.metadata` pickle, and their numbers (checkpoint-rows F-03).
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "format/dcp/dcp.h"
#include "tessera/error.h"
#include "value/render.h"

namespace tessera::dcp {

[[noreturn]] void corrupt(std::string what);

inline constexpr const char* kMetadataModule = "torch.distributed.checkpoint.metadata";
inline constexpr const char* kFilesystemModule = "torch.distributed.checkpoint.filesystem";
// Where torch 2 has the classes of a module: torch 1.13 has those of the two modules above in
// torch.distributed._shard.checkpoint. Any other module stays.
[[nodiscard]] std::string_view newer_module(std::string_view module);
// olmo_core has a _StorageInfo of its own, without transforms.
inline constexpr const char* kOlmoFilesystemModule = "olmo_core.distributed.checkpoint.filesystem";
// The module where older torch has TensorProperties and MEM_FORMAT_ENCODING.
inline constexpr const char* kOldPropertiesModule =
    "torch.distributed._shard.sharded_tensor.metadata";

// The largest argument of MEM_FORMAT_ENCODING: contiguous, channels last, preserve.
inline constexpr std::int64_t kLastMemoryFormat = 2;

// The class of the memory formats, by both of its names.
[[nodiscard]] bool is_memory_format_class(std::string_view module, std::string_view name);
// One of its members as a global: CLASS.NAME, or NAME of the module.
[[nodiscard]] bool is_memory_format_name(std::string_view module, std::string_view name);

// Puts the parts of a `.metadata` together and refuses those that do not fit (checkpoint-rows
// F-03).

// Throws `limit` for more dimensions than torch has.
void require_dimensions(std::size_t count);

// What `work` returns; an error that leaves it names the entry.
template <class Work>
decltype(auto) about_entry(std::string_view name, const Work& work) {
  try {
    return work();
  } catch (Error& error) {
    error.at_key(printable(name));
    throw;
  }
}

// Appends one of the parts that pathlib keeps of a path.
void append_path_part(std::string& path, std::string_view part);

// A chunk lies inside its tensor, whose shape is known.
void require_chunk_inside(const Entry& entry, std::span<const std::int64_t> offsets,
                          std::span<const std::int64_t> sizes);

// First all entries, then paths and items, then finish. Every function throws as decode() does,
// with the entry's name.
class Assembler {
 public:
  // `entry` has its chunks, all of them inside, and no items yet. Names are unique.
  void add_entry(Entry entry);
  // A path of a name without an entry is passed over.
  void set_path(std::string_view name, Path path);

  // An index says where an item goes: to the chunk at `offset` or, without an offset, to an object
  // or a tensor of one chunk. `hint`: the chunk's number, to be trusted only when the offset
  // agrees.
  struct Index {
    std::optional<std::span<const std::int64_t>> offset;
    std::optional<std::int64_t> hint;
  };
  void add_item(std::string_view name, const Index& index, const ItemView& item);

  // Every object and chunk has its item. To be called once.
  [[nodiscard]] Metadata finish();

  Metadata metadata;  // the rest of it is filled in by the caller

 private:
  using Numbers = std::span<const std::int64_t>;

  void place_item(std::size_t at, const Index& index, const ItemView& item);
  // The number of the chunk that an index means.
  std::size_t chunk_of(std::size_t at, const Index& index);
  std::size_t chunk_at(std::size_t at, Numbers offset, std::optional<std::int64_t> hint);
  // The chunk that is meant as a rule: of that number, or else the next one. None: it is another.
  std::optional<std::size_t> likely_chunk(std::size_t at, Numbers offset,
                                          std::optional<std::int64_t> hint);
  const std::map<Shape, std::size_t>& chunks_by_offset(std::size_t at);
  // The entry's number, kept from one call to the next: items of one entry follow each other.
  std::optional<std::size_t> number_of(std::string_view name);
  void number_entries();

  std::shared_ptr<ItemTexts> texts_ = std::make_shared<ItemTexts>();
  std::unordered_map<std::string_view, std::size_t> by_name_;  // into the entries' own names
  std::vector<std::map<Shape, std::size_t>> found_;            // per entry, made when a hint fails
  std::size_t last_ = 0;                                       // the entry of the latest item
  std::size_t next_chunk_ = 0;  // of that entry, where the next item goes as a rule
};

}  // namespace tessera::dcp
