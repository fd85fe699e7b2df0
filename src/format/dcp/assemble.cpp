#include "format/dcp/assemble.h"

#include <utility>

#include "base/checked.h"
#include "tessera/error.h"
#include "value/render.h"

namespace tessera::dcp {
namespace {

constexpr std::size_t kMaxDims = 64;  // as in torch

[[noreturn]] void corrupt(std::string what) {
  throw Error(ErrorCode::corrupt, std::move(what));
}

// A path stays below the checkpoint's directory whatever it is joined to.
void require_contained(const std::string& path) {
  const auto refuse = [&path](const char* why) {
    throw Error(ErrorCode::unsafe, "data file path '" + printable(path, 200) + "' " + why);
  };
  if (path.empty()) refuse("is empty");
  if (path.find('\0') != std::string::npos) refuse("holds a zero byte");
  if (path.find("://") != std::string::npos) refuse("is a URL");
  if (path.front() == '/' || path.front() == '\\') refuse("is absolute");
  for (std::size_t begin = 0; begin <= path.size();) {
    const std::size_t end = std::min(path.find_first_of("/\\", begin), path.size());
    if (path.compare(begin, end - begin, "..") == 0) refuse("leaves the checkpoint's directory");
    begin = end + 1;
  }
}

}  // namespace

void require_dimensions(std::size_t count) {
  if (count <= kMaxDims) return;
  throw Error(ErrorCode::limit,
              std::to_string(count) + " dimensions, expected at most " + std::to_string(kMaxDims));
}

void Assembler::add_entry(Entry entry) {
  try {
    if (entry.is_tensor) {
      require_dimensions(entry.shape.size());
      (void)numel(entry.shape);
      for (const Chunk& chunk : entry.chunks) {
        require_dimensions(chunk.box.offsets.size());
        require_dimensions(chunk.box.sizes.size());
        require_inside(chunk.box, entry.shape);
      }
    }
  } catch (Error& error) {
    error.at_key(printable(entry.name));
    throw;
  }
  metadata.entries.push_back(std::move(entry));
}

std::optional<std::size_t> Assembler::number_of(const std::string& name) {
  auto& entries = metadata.entries;
  if (by_name_.empty()) {
    by_name_.reserve(entries.size());
    for (std::size_t i = 0; i < entries.size(); ++i) by_name_.emplace(entries[i].name, i);
    found_.resize(entries.size());
  }
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
  try {
    const auto number = number_of(name);
    if (!number) {
      metadata.warnings.push_back("an item in a data file belongs to no entry: " + printable(name));
      return;
    }
    require_contained(item.path);
    (void)checked_add(item.offset, item.length);
    place(*number, index, std::move(item));
  } catch (Error& error) {
    error.at_key(printable(name));
    throw;
  }
}

// Gives an item to the chunk that it is for. An index is known by name and offset; its number is a
// hint. A chunk that has an item has a path.
void Assembler::place(std::size_t at, const Index& index, Item item) {
  Entry& entry = metadata.entries[at];
  Item* slot = &entry.item;
  if (entry.is_tensor) {
    if (!index.offset && entry.chunks.size() != 1) corrupt("the item of a chunk has no offset");
    slot = index.offset ? &chunk_at(at, *index.offset, index.hint).item : &entry.chunks[0].item;
  } else if (index.offset) {
    corrupt("the item of an object has an offset");
  }
  if (!slot->path.empty()) corrupt("two items in data files for one place");
  *slot = std::move(item);
}

Chunk& Assembler::chunk_at(std::size_t at, const Shape& offset, std::optional<std::int64_t> hint) {
  auto& chunks = metadata.entries[at].chunks;
  const auto fits = [&](std::size_t number) {
    return number < chunks.size() && chunks[number].box.offsets == offset;
  };
  if (hint && *hint >= 0 && fits(static_cast<std::size_t>(*hint)))
    return chunks[static_cast<std::size_t>(*hint)];
  if (!hint && fits(next_chunk_) && chunks[next_chunk_].item.path.empty())
    return chunks[next_chunk_++];
  auto& by_offset = found_[at];
  if (by_offset.empty()) {
    for (std::size_t i = 0; i < chunks.size(); ++i) by_offset.emplace(chunks[i].box.offsets, i);
  }
  const auto found = by_offset.find(offset);
  if (found == by_offset.end()) corrupt("no chunk begins at " + to_string(offset));
  return chunks[found->second];
}

Metadata Assembler::finish() {
  for (const Entry& entry : metadata.entries) {
    const auto refuse = [&entry](const std::string& what) {
      throw Error(ErrorCode::incomplete, what + " is in no data file")
          .at_key(printable(entry.name));
    };
    if (!entry.is_tensor && entry.item.path.empty()) refuse("the object");
    for (const Chunk& chunk : entry.chunks) {
      if (chunk.item.path.empty()) refuse("the chunk at " + to_string(chunk.box.offsets));
    }
  }
  return std::move(metadata);
}

}  // namespace tessera::dcp
