#include "format/dcp/assemble.h"

#include <algorithm>
#include <utility>

#include "base/checked.h"
#include "base/one_of.h"
#include "tessera/error.h"
#include "value/render.h"

namespace tessera::dcp {
namespace {

constexpr std::size_t kMaxDims = 64;  // as in torch

[[noreturn]] void corrupt(std::string what) {
  throw Error(ErrorCode::corrupt, std::move(what));
}

// Whether one of the path's parts is "..", between separators of any system.
bool has_parent_part(std::string_view path) {
  for (std::size_t begin = 0; begin <= path.size();) {
    const std::size_t end = std::min(path.find_first_of("/\\", begin), path.size());
    if (path.substr(begin, end - begin) == "..") return true;
    begin = end + 1;
  }
  return false;
}

// A path stays below the checkpoint's directory whatever it is joined to.
void require_contained(const std::string& path) {
  const auto refuse = [&path](const char* why) {
    throw Error(ErrorCode::unsafe, "data file path '" + printable(path, 200) + "' " + why);
  };
  if (path.empty()) refuse("is empty");
  if (path.find('\0') != std::string::npos) refuse("holds a zero byte");
  if (path.find("://") != std::string::npos) refuse("is a URL");
  if (is_one_of(path.front(), '/', '\\')) refuse("is absolute");
  if (has_parent_part(path)) refuse("leaves the checkpoint's directory");
}

void require_chunks_inside(const Entry& tensor) {
  require_dimensions(tensor.shape.size());
  (void)numel(tensor.shape);
  for (const Chunk& chunk : tensor.chunks) {
    require_dimensions(chunk.box.offsets.size());
    require_dimensions(chunk.box.sizes.size());
    require_inside(chunk.box, tensor.shape);
  }
}

// Whether the entry has a chunk of this number, and that one begins at `offset`.
bool begins_at(const std::vector<Chunk>& chunks, std::size_t number, const Shape& offset) {
  return number < chunks.size() && chunks[number].box.offsets == offset;
}

// What has an item has the path of a data file.
bool has_item(const Chunk& chunk) {
  return !chunk.item.path.empty();
}

void require_items(const Entry& entry) {
  const auto refuse = [&entry](const std::string& what) {
    throw Error(ErrorCode::incomplete, what + " is in no data file").at_key(printable(entry.name));
  };
  if (!entry.is_tensor && entry.item.path.empty()) refuse("the object");
  const auto bare = std::ranges::find_if_not(entry.chunks, has_item);
  if (bare != entry.chunks.end()) refuse("the chunk at " + to_string(bare->box.offsets));
}

}  // namespace

void require_dimensions(std::size_t count) {
  if (count <= kMaxDims) return;
  throw Error(ErrorCode::limit,
              std::to_string(count) + " dimensions, expected at most " + std::to_string(kMaxDims));
}

void append_path_part(std::string& path, std::string_view part) {
  if (!path.empty() && !path.ends_with('/')) path += '/';
  path += part;
}

void Assembler::add_entry(Entry entry) {
  if (entry.is_tensor) about_entry(entry.name, [&entry] { require_chunks_inside(entry); });
  metadata.entries.push_back(std::move(entry));
}

void Assembler::number_entries() {
  const auto& entries = metadata.entries;
  by_name_.reserve(entries.size());
  for (std::size_t i = 0; i < entries.size(); ++i) by_name_.emplace(entries[i].name, i);
  found_.resize(entries.size());
}

std::optional<std::size_t> Assembler::number_of(const std::string& name) {
  const auto& entries = metadata.entries;
  if (by_name_.empty()) number_entries();
  if (last_ < entries.size() && entries[last_].name == name) return last_;
  const auto found = by_name_.find(name);
  if (found == by_name_.end()) return std::nullopt;
  last_ = found->second;
  next_chunk_ = 0;
  return last_;
}

void Assembler::set_path(const std::string& name, Path path) {
  if (const auto number = number_of(name)) metadata.entries[*number].path = std::move(path);
}

void Assembler::add_item(const std::string& name, const Index& index, Item item) {
  about_entry(name, [&] {
    const auto number = number_of(name);
    if (!number) {
      metadata.warnings.push_back("an item in a data file belongs to no entry: " + printable(name));
      return;
    }
    require_contained(item.path);
    (void)checked_add(item.offset, item.length);
    Item& slot = slot_of(*number, index);
    if (!slot.path.empty()) corrupt("two items in data files for one place");
    slot = std::move(item);
  });
}

// The place of an item. An index is known by name and offset; its number is a hint.
Item& Assembler::slot_of(std::size_t at, const Index& index) {
  Entry& entry = metadata.entries[at];
  if (!entry.is_tensor) {
    if (index.offset) corrupt("the item of an object has an offset");
    return entry.item;
  }
  if (index.offset) return chunk_at(at, *index.offset, index.hint).item;
  if (entry.chunks.size() != 1) corrupt("the item of a chunk has no offset");
  return entry.chunks[0].item;
}

Chunk& Assembler::chunk_at(std::size_t at, const Shape& offset, std::optional<std::int64_t> hint) {
  if (Chunk* likely = likely_chunk(at, offset, hint)) return *likely;
  const auto& by_offset = chunks_by_offset(at);
  const auto found = by_offset.find(offset);
  if (found == by_offset.end()) corrupt("no chunk begins at " + to_string(offset));
  return metadata.entries[at].chunks[found->second];
}

Chunk* Assembler::likely_chunk(std::size_t at, const Shape& offset,
                               std::optional<std::int64_t> hint) {
  auto& chunks = metadata.entries[at].chunks;
  if (hint) {
    const auto number = static_cast<std::size_t>(*hint);  // a negative one becomes too large
    return begins_at(chunks, number, offset) ? &chunks[number] : nullptr;
  }
  const bool next = begins_at(chunks, next_chunk_, offset) && !has_item(chunks[next_chunk_]);
  return next ? &chunks[next_chunk_++] : nullptr;
}

const std::map<Shape, std::size_t>& Assembler::chunks_by_offset(std::size_t at) {
  const auto& chunks = metadata.entries[at].chunks;
  auto& by_offset = found_[at];
  if (!by_offset.empty()) return by_offset;
  for (std::size_t i = 0; i < chunks.size(); ++i) by_offset.emplace(chunks[i].box.offsets, i);
  return by_offset;
}

Metadata Assembler::finish() {
  for (const Entry& entry : metadata.entries) require_items(entry);
  return std::move(metadata);
}

}  // namespace tessera::dcp
