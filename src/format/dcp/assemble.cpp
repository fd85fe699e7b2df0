#include "format/dcp/assemble.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <memory>
#include <unordered_map>
#include <utility>

#include "base/numbers.h"
#include "base/text.h"
#include "format/dcp/dcp.h"
#include "tessera/error.h"
#include "value/render.h"

namespace tessera::dcp {
void corrupt(std::string what) {
  throw Error(ErrorCode::corrupt, std::move(what));
}

namespace {

constexpr std::size_t kMaxDims = 64;  // as in torch

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
void require_contained(std::string_view path) {
  const auto refuse = [&path](const char* why) {
    throw Error(ErrorCode::unsafe, "data file path '" + printable(path, 200) + "' " + why);
  };
  if (path.empty()) refuse("is empty");
  if (path.find('\0') != std::string_view::npos) refuse("holds a zero byte");
  if (path.find("://") != std::string_view::npos) refuse("is a URL");
  if (is_one_of(path.front(), '/', '\\')) refuse("is absolute");
  if (has_parent_part(path)) refuse("leaves the checkpoint's directory");
}

void require_shape(const Shape& shape) {
  require_dimensions(shape.size());
  (void)numel(shape);
}

// As require_inside has it, without its answer: nearly all lie inside.
bool lies_inside(std::span<const std::int64_t> offsets, std::span<const std::int64_t> sizes,
                 const Shape& shape) {
  if (offsets.size() != shape.size() || sizes.size() != shape.size()) return false;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    if (sizes[d] < 0 || sizes[d] > shape[d]) return false;
    if (offsets[d] < 0 || offsets[d] > shape[d] - sizes[d]) return false;
  }
  return true;
}

bool equal(std::span<const std::int64_t> a, std::span<const std::int64_t> b) {
  return std::ranges::equal(a, b);
}

// Whether the entry has a chunk of this number, and that one begins at `offset`.
bool begins_at(const Chunks& chunks, std::size_t number, std::span<const std::int64_t> offset) {
  return number < chunks.size() && equal(chunks.box_offsets(number), offset);
}

Shape shape_of(std::span<const std::int64_t> numbers) {
  return {numbers.begin(), numbers.end()};
}

void require_items(const Entry& entry) {
  const auto refuse = [&entry](const std::string& what) {
    throw Error(ErrorCode::incomplete, what + " is in no data file").at_key(printable(entry.name));
  };
  if (!entry.is_tensor && entry.item.path.empty()) refuse("the object");
  for (std::size_t i = 0; i < entry.chunks.size(); ++i) {
    if (entry.chunks.has_item(i)) continue;
    refuse("the chunk at " + to_string(shape_of(entry.chunks.box_offsets(i))));
  }
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

void require_chunk_inside(const Entry& entry, std::span<const std::int64_t> offsets,
                          std::span<const std::int64_t> sizes) {
  if (lies_inside(offsets, sizes, entry.shape)) return;
  require_shape(entry.shape);
  require_dimensions(offsets.size());
  require_dimensions(sizes.size());
  require_inside(Box{shape_of(offsets), shape_of(sizes)}, entry.shape);
}

void Assembler::add_entry(Entry entry) {
  if (entry.is_tensor) about_entry(entry.name, [&entry] { require_shape(entry.shape); });
  entry.chunks.use_texts(texts_);
  metadata.entries.push_back(std::move(entry));
}

void Assembler::number_entries() {
  const auto& entries = metadata.entries;
  by_name_.reserve(entries.size());
  for (std::size_t i = 0; i < entries.size(); ++i) by_name_.emplace(entries[i].name, i);
  found_.resize(entries.size());
}

std::optional<std::size_t> Assembler::number_of(std::string_view name) {
  const auto& entries = metadata.entries;
  if (by_name_.empty()) number_entries();
  if (last_ < entries.size() && entries[last_].name == name) return last_;
  const auto found = by_name_.find(name);
  if (found == by_name_.end()) return std::nullopt;
  last_ = found->second;
  next_chunk_ = 0;
  return last_;
}

void Assembler::set_path(std::string_view name, Path path) {
  if (const auto number = number_of(name)) metadata.entries[*number].path = std::move(path);
}

void Assembler::add_item(std::string_view name, const Index& index, const ItemView& item) {
  about_entry(name, [&] {
    const auto number = number_of(name);
    if (!number) {
      metadata.warnings.push_back("an item in a data file belongs to no entry: " + printable(name));
      return;
    }
    require_contained(item.path);
    (void)checked_add(item.offset, item.length);
    place_item(*number, index, item);
  });
}

// An index is known by name and offset; its number is a hint.
void Assembler::place_item(std::size_t at, const Index& index, const ItemView& item) {
  const auto refuse_second = [] { corrupt("two items in data files for one place"); };
  Entry& entry = metadata.entries[at];
  if (entry.is_tensor) {
    const std::size_t number = chunk_of(at, index);
    if (entry.chunks.has_item(number)) refuse_second();
    entry.chunks.set_item(number, item);
    return;
  }
  if (index.offset) corrupt("the item of an object has an offset");
  if (!entry.item.path.empty()) refuse_second();
  entry.item = {std::string(item.path),
                item.offset,
                item.length,
                {item.transforms.begin(), item.transforms.end()}};
}

std::size_t Assembler::chunk_of(std::size_t at, const Index& index) {
  if (index.offset) return chunk_at(at, *index.offset, index.hint);
  if (metadata.entries[at].chunks.size() != 1) corrupt("the item of a chunk has no offset");
  return 0;
}

std::size_t Assembler::chunk_at(std::size_t at, Numbers offset, std::optional<std::int64_t> hint) {
  if (const auto likely = likely_chunk(at, offset, hint)) return *likely;
  const auto& by_offset = chunks_by_offset(at);
  const auto found = by_offset.find(shape_of(offset));
  if (found == by_offset.end()) corrupt("no chunk begins at " + to_string(shape_of(offset)));
  return found->second;
}

std::optional<std::size_t> Assembler::likely_chunk(std::size_t at, Numbers offset,
                                                   std::optional<std::int64_t> hint) {
  const auto& chunks = metadata.entries[at].chunks;
  if (hint) {
    const auto number = static_cast<std::size_t>(*hint);  // a negative one becomes too large
    return begins_at(chunks, number, offset) ? std::optional(number) : std::nullopt;
  }
  const bool next = begins_at(chunks, next_chunk_, offset) && !chunks.has_item(next_chunk_);
  return next ? std::optional(next_chunk_++) : std::nullopt;
}

const std::map<Shape, std::size_t>& Assembler::chunks_by_offset(std::size_t at) {
  const auto& chunks = metadata.entries[at].chunks;
  auto& by_offset = found_[at];
  if (!by_offset.empty()) return by_offset;
  for (std::size_t i = 0; i < chunks.size(); ++i)
    by_offset.emplace(shape_of(chunks.box_offsets(i)), i);
  return by_offset;
}

Metadata Assembler::finish() {
  for (const Entry& entry : metadata.entries) require_items(entry);
  return std::move(metadata);
}

// The `__{rank}.metadata` of a save without collectives, as one.

namespace {

std::string describe(const Entry& entry) {
  if (!entry.is_tensor) return "a value";
  return std::string(to_string(entry.dtype)) + " " + to_string(entry.shape);
}

class Merger {
 public:
  void add(Metadata&& part, std::size_t rank) {
    for (Entry& entry : part.entries) add_entry(entry, rank);
    std::ranges::move(part.warnings, std::back_inserter(whole_.warnings));
  }

  Metadata run(std::vector<Metadata>&& ranks) && {
    whole_.version = ranks.front().version;
    whole_.checkpoint_id = ranks.front().checkpoint_id;
    whole_.save_id = ranks.front().save_id;
    whole_.has_planner_data = ranks.front().has_planner_data;
    for (std::size_t rank = 0; rank < ranks.size(); ++rank) add(std::move(ranks[rank]), rank);
    return std::move(whole_);
  }

 private:
  using ByOffset = std::map<Shape, std::size_t>;

  [[noreturn]] static void fail(const Entry& entry, const std::string& what) {
    throw Error(ErrorCode::corrupt, what).at_key(printable(entry.name));
  }

  void add_entry(Entry& entry, std::size_t rank) {
    const auto [found, fresh] = by_name_.try_emplace(entry.name, whole_.entries.size());
    if (fresh) {
      whole_.entries.push_back(entry);
      whole_.entries.back().chunks = Chunks(texts_);
      chunks_.emplace_back();
    }
    Entry& known = whole_.entries[found->second];
    if (describe(known) != describe(entry)) {
      fail(entry, "rank " + std::to_string(rank) + " has " + describe(entry) +
                      ", a rank before it " + describe(known));
    }
    for (const Chunk& chunk : entry.chunks) take(known, chunks_[found->second], chunk);
  }

  static void take(Entry& known, ByOffset& by_offset, const Chunk& chunk) {
    const auto [found, fresh] = by_offset.try_emplace(chunk.box.offsets, known.chunks.size());
    if (fresh) {
      known.chunks.push_back(chunk);
    } else if (known.chunks[found->second].box != chunk.box) {
      fail(known, "two ranks have chunks of different sizes at " + to_string(chunk.box.offsets));
    }
  }

  Metadata whole_;
  std::shared_ptr<ItemTexts> texts_ = std::make_shared<ItemTexts>();
  std::unordered_map<std::string, std::size_t> by_name_;
  std::vector<ByOffset> chunks_;  // of each entry
};

}  // namespace

Metadata merge(std::vector<Metadata> ranks) {
  return Merger().run(std::move(ranks));
}

}  // namespace tessera::dcp
