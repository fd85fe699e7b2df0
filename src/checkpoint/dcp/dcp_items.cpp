#include "checkpoint/dcp/dcp_items.h"

#include <algorithm>

#include "base/numbers.h"
#include "base/text.h"
#include "checkpoint/dcp/read_catalog.h"
#include "checkpoint/read/tail.h"
#include "checkpoint/read/zstd.h"
#include "format/torch/torch_file.h"
#include "storage/lazy_source.h"
#include "tessera/error.h"
#include "value/render.h"

namespace tessera {
namespace {

constexpr const char* kZstd = "stream.zstd/";  // and a version; all of major version 1 are alike

bool is_zstd(const std::string& transform) {
  const std::string prefix = std::string(kZstd) + "1";
  return transform == prefix || transform.starts_with(prefix + ".");
}

// `found`: what the data file's own header says of the chunk.
[[noreturn]] void refuse_chunk(const std::string& found, const dcp::Entry& entry,
                               std::size_t number, const ByteSource& source) {
  const dcp::Chunk chunk = entry.chunks[number];
  throw Error(ErrorCode::corrupt, "the data file has " + found + ", .metadata says " +
                                      std::string(to_string(entry.dtype)) + " " +
                                      to_string(chunk.box.sizes) + " at " +
                                      to_string(chunk.box.offsets))
      .at_path(source.name());
}

}  // namespace

bool is_raw_chunk(const dcp::Entry& entry, std::size_t number) {
  const dcp::ItemView item = entry.chunks.item(number);
  std::uint64_t bytes = size_of(entry.dtype);
  for (const std::int64_t size : entry.chunks.box_sizes(number))
    bytes = checked_mul(bytes, static_cast<std::uint64_t>(size));
  return item.transforms.empty() && item.length == bytes;
}

Encoding encoding_of(const dcp::ItemView& item) {
  if (item.transforms.empty()) return Encoding::torch_item;
  const std::string& name = item.transforms.front();
  const bool zstd = is_zstd(name);
  if (zstd && item.transforms.size() == 1) return Encoding::torch_item_zstd;
  throw Error(ErrorCode::unsupported, "the item went through the stream extension '" +
                                          printable(zstd ? item.transforms[1] : name) + "'")
      .at_path(std::string(item.path));
}

dcp::ItemView view_of(const dcp::Item& item) {
  return {item.path, item.offset, item.length, item.transforms};
}

DataFiles::DataFiles(std::shared_ptr<Store> store)
    : store_(std::move(store)),
      open_(std::make_shared<OpenFiles>()),
      near_(*store_),
      last_(files_.end()) {}

void DataFiles::require_nothing_there(std::string_view path) const {
  try {
    (void)store_->open(path);  // says so when something else has the name
  } catch (const Error& error) {
    if (error.code() != ErrorCode::not_found) throw;
  }
}

// Items of one file follow each other, or those of one tensor, whose files follow each other.
DataFiles::Files::iterator DataFiles::find(std::string_view path) {
  for (int step = 0; step < 2 && last_ != files_.end(); ++step, ++last_) {
    if (last_->first == path) return last_;
  }
  last_ = files_.find(path);
  if (last_ != files_.end()) return last_;
  const ObjectInfo* object = near_.find(path);
  if (object == nullptr) require_nothing_there(path);
  last_ = files_.try_emplace(std::string(path)).first;
  File& file = last_->second;
  file.object = object != nullptr ? *object : ObjectInfo{std::string(path)};
  file.is_missing = object == nullptr;
  return last_;
}

DataFiles::File& DataFiles::file(const dcp::ItemView& item, const std::string& key, bool apart) {
  File& file = find(item.path)->second;
  file.is_wanted = true;
  const std::uint64_t end = checked_add(item.offset, item.length);
  if (file.is_missing) file.object.size = std::max(file.object.size, end);
  if (end > file.object.size && !cut_)
    cut_ = {&key, item.offset, store_->name() + "/" + file.object.name};
  file.end = std::max(file.end, end);
  ++file.items;
  if (apart) file.extents.push_back({item.offset, end, &key});
  if (!file.source) {
    file.source = std::make_shared<LazySource>(store_, file.object, file.is_missing, open_);
    file.number = narrow<std::uint32_t>(numbered_.size());
    numbered_.push_back(&file);
  }
  return file;
}

void DataFiles::pass_over(const dcp::ItemView& item) {
  File& file = find(item.path)->second;
  if (file.is_missing) return;
  file.end = std::max(file.end, checked_add(item.offset, item.length));
  ++file.items;
}

void DataFiles::leave_out(const dcp::Entry& entry) {
  if (!entry.is_tensor) return pass_over(view_of(entry.item));
  for (std::size_t i = 0; i < entry.chunks.size(); ++i) {
    const dcp::ItemView item = entry.chunks.item(i);
    pass_over(item);
    if (!is_raw_chunk(entry, i)) continue;
    File& file = find(item.path)->second;  // one safetensors file from end to end
    file.end = std::max(file.end, file.object.size);
  }
}

bool DataFiles::is_here(const dcp::ItemView& item) {
  File& file = find(item.path)->second;
  if (file.is_missing) file.is_wanted = true;
  return !file.is_missing;
}

std::vector<std::string> DataFiles::missing() const {
  std::vector<std::string> names;
  for (const auto& [name, file] : files_) {
    if (file.is_missing && file.is_wanted) names.push_back(name);
  }
  return names;
}

std::vector<std::string> DataFiles::idle() const {
  std::vector<std::string> names;
  for (const auto& [name, file] : files_) {
    if (!file.is_missing && !file.is_wanted) names.push_back(name);
  }
  return names;
}

void DataFiles::require_long_enough(const dcp::Metadata& metadata) {
  if (!cut_) return;
  for (const dcp::Entry& entry : metadata.entries) {
    if (!entry.is_tensor) pass_over(view_of(entry.item));
    for (const dcp::Chunk& chunk : entry.chunks) pass_over(view_of(chunk.item));
  }
  Named named;
  for (const auto& [name, file] : files_) {
    if (file.is_missing || file.end <= file.object.size) continue;
    named.add(printable(name, 200) + " has " + std::to_string(file.object.size) +
              " bytes, its items reach to " + std::to_string(file.end) + ": " +
              std::to_string(file.end - file.object.size) + " are missing");
  }
  throw Error(ErrorCode::incomplete, "data files are cut short: " + named.text())
      .at_path(cut_->path)
      .at_key(*cut_->key)
      .at_offset(cut_->offset);
}

void DataFiles::require_apart() {
  for (auto& [path, file] : files_) {
    std::ranges::sort(file.extents, {}, &Extent::begin);
    for (std::size_t i = 1; i < file.extents.size(); ++i) {
      const Extent& before = file.extents[i - 1];
      const Extent& extent = file.extents[i];
      if (extent.begin >= before.end) continue;
      throw Error(ErrorCode::corrupt,
                  "the item lies on bytes of an item of '" + printable(*before.key, 200) + "'")
          .at_path(store_->name() + "/" + path)
          .at_key(*extent.key)
          .at_offset(extent.begin);
    }
  }
}

const DataFiles::Body& DataFiles::body(const dcp::ItemView& item,
                                       const std::shared_ptr<const ByteSource>& source) {
  const auto [found, fresh] = bodies_.try_emplace({std::string(item.path), item.offset});
  if (fresh) {
    const auto rest = slice_source(source, item.offset, source->size() - item.offset);
    found->second.header = safetensors::read_header(*rest);
    found->second.offsets = sharding_offsets(found->second.header.metadata);
  }
  return found->second;
}

const safetensors::Entry& DataFiles::entry_of(const Body& body, const dcp::Entry& entry,
                                              std::size_t number, const ByteSource& source) {
  const auto found = std::ranges::find(body.header.entries, entry.name, &safetensors::Entry::name);
  if (found == body.header.entries.end()) refuse_chunk("no such tensor", entry, number, source);
  if (found->dtype != entry.dtype ||
      !std::ranges::equal(found->shape, entry.chunks.box_sizes(number))) {
    refuse_chunk(std::string(to_string(found->dtype)) + " " + to_string(found->shape), entry,
                 number, source);
  }
  const auto at = body.offsets.find(entry.name);
  if (at != body.offsets.end() &&
      !std::ranges::equal(at->second, entry.chunks.box_offsets(number))) {
    refuse_chunk("a tensor that was saved from " + to_string(at->second), entry, number, source);
  }
  return *found;
}

ItemRange DataFiles::chunk(const dcp::Entry& entry, std::size_t number) {
  const dcp::ItemView item = entry.chunks.item(number);
  const bool plain = is_raw_chunk(entry, number);
  File& holder = file(item, entry.name, !plain);
  if (!plain) return {holder.number, item.offset, item.length, encoding_of(item)};
  if (holder.is_missing || is_cut())
    return {holder.number, item.offset, item.length, Encoding::raw};
  const Body& inside = body(item, holder.source);
  const safetensors::Entry& found = entry_of(inside, entry, number, *holder.source);
  holder.end = holder.source->size();
  return {holder.number, item.offset + inside.header.data_offset + found.begin, item.length,
          Encoding::raw};
}

ItemRange DataFiles::item(const dcp::Entry& entry) {
  const Encoding encoding = encoding_of(view_of(entry.item));
  const File& holder = file(view_of(entry.item), entry.name, true);
  return {holder.number, entry.item.offset, entry.item.length, encoding};
}

Value read_value(std::shared_ptr<const ByteSource> file, const ItemRange& place) {
  std::shared_ptr<const ByteSource> bytes = slice_source(std::move(file), place.offset, place.size);
  if (place.encoding == Encoding::torch_item_zstd) bytes = zstd_source(std::move(bytes), kValueCap);
  return torch_file::read(std::move(bytes));
}

std::vector<CatalogFile> DataFiles::used() const {
  std::vector<CatalogFile> files(numbered_.size());
  for (const auto& [name, file] : files_) {
    if (file.source) files[file.number] = {file.object, std::nullopt, file.is_missing};
  }
  return files;
}

std::vector<std::string> DataFiles::warnings() const {
  std::vector<std::string> warnings;
  for (const auto& [name, file] : files_) {
    if (!file.source || file.end >= file.object.size) continue;
    const std::uint64_t behind = file.object.size - file.end;
    if (is_attempt_name(name) && behind == tail_size(file.end, file.items)) continue;
    warnings.push_back(printable(name) + " has " + std::to_string(behind) +
                       " bytes after its last item");
  }
  return warnings;
}

}  // namespace tessera
