#include "checkpoint/dcp/read_catalog.h"

#include <algorithm>
#include <map>
#include <utility>

#include <nlohmann/json.hpp>

#include "base/text.h"
#include "checkpoint/dcp/dcp_items.h"
#include "checkpoint/dcp/guard_dcp.h"
#include "checkpoint/read/json_writer.h"
#include "checkpoint/read/missing.h"
#include "format/pickle/pickle.h"
#include "layout/boxes.h"
#include "layout/plan.h"
#include "tessera/error.h"
#include "tessera/io.h"
#include "value/inner_tensors.h"

namespace tessera {
namespace {

constexpr std::string_view kPrefix = "__";  // a rank follows

}  // namespace

dcp::Metadata read_dcp_metadata(const Store& store, std::string_view name) {
  return read_dcp_metadata(*store.open(name));
}

dcp::Metadata read_dcp_metadata(const ByteSource& file) {
  try {
    return dcp::decode(read_all(file, kMetadataLimit));
  } catch (Error& error) {
    throw error.at_path(file.name());
  }
}

std::string rank_metadata(int rank) {
  return std::string(kPrefix) + std::to_string(rank).append(kDcpMetadata);
}

bool is_rank_metadata(std::string_view name) {
  return number_between(kPrefix, name, kDcpMetadata).has_value();
}

std::optional<int> rank_of_data_file(std::string_view name) {
  const std::size_t end = name.find('_', std::min(kPrefix.size(), name.size()));
  return end == std::string_view::npos ? std::nullopt
                                       : number_between(kPrefix, name.substr(0, end), "");
}

std::set<std::string> named_files(const dcp::Metadata& metadata) {
  std::set<std::string> named;
  for (const dcp::Entry& entry : metadata.entries) {
    if (!entry.is_tensor) named.insert(entry.item.path);
    for (const dcp::Chunk& chunk : entry.chunks) named.insert(chunk.item.path);
  }
  return named;
}

bool is_attempt_name(std::string_view name) {
  return rank_of_data_file(name) && name.ends_with(".distcp") &&
         std::count(name.begin(), name.end(), '_') == 4;
}

namespace {

using Json = nlohmann::json;

constexpr int kMaxDepth = 3;  // the object, a tensor's object, its offsets

std::int64_t offset_of(const Json& number, const std::string& name) {
  const bool fits = number.is_number_unsigned() && number.get<std::uint64_t>() <= INT64_MAX;
  if (!fits) throw Error(ErrorCode::corrupt, "a saved offset is " + number.dump()).at_key(name);
  return number.get<std::int64_t>();
}

Shape offsets_of(const Json& json, const std::string& name) {
  if (!json.is_array()) throw Error(ErrorCode::corrupt, "saved_offsets are no list").at_key(name);
  Shape offsets;
  for (const Json& number : json) offsets.push_back(offset_of(number, name));
  return offsets;
}

Json parsed(const std::string& text) {
  return Json::parse(text, [](int depth, Json::parse_event_t, Json&) {
    if (depth <= kMaxDepth) return true;
    throw Error(ErrorCode::corrupt, std::string(kShardingKey) + " is nested too deep");
  });
}

}  // namespace

std::map<std::string, Shape> sharding_offsets(const std::map<std::string, std::string>& metadata) {
  std::map<std::string, Shape> offsets;
  const auto entry = metadata.find(kShardingKey);
  if (entry == metadata.end()) return offsets;
  try {
    const Json json = parsed(entry->second);
    for (const auto& [name, info] : json.items()) {
      offsets[name] = offsets_of(info.at("saved_offsets"), name);
    }
  } catch (const Json::exception& error) {
    throw Error(ErrorCode::corrupt,
                std::string(kShardingKey) + " is malformed: " + json_fault(error));
  }
  return offsets;
}

namespace {

// The number of ranks, from file names; 0 when the names say nothing.
int world_size_of(const std::vector<CatalogFile>& files, const std::vector<std::string>& missing) {
  int last = -1;
  for (const CatalogFile& file : files)
    last = std::max(last, rank_of_data_file(file.info.name).value_or(-1));
  for (const std::string& name : missing)
    last = std::max(last, rank_of_data_file(name).value_or(-1));
  return last + 1;
}

std::map<std::string, ObjectInfo> rank_metadata_by_name(const Store& store) {
  std::map<std::string, ObjectInfo> found;
  for (const ObjectInfo& object : store.list_level()) {
    if (is_rank_metadata(object.name)) found.emplace(object.name, object);
  }
  return found;
}

// The `__{rank}.metadata` of a save without collectives (checkpoint-rows P-04), in the order of
// ranks. Not one is there when the `.metadata` that made somebody look has gone.
std::vector<ObjectInfo> rank_metadata_files(const Store& store) {
  std::vector<ObjectInfo> files;
  const std::map<std::string, ObjectInfo> found = rank_metadata_by_name(store);
  if (found.empty())
    throw Error(ErrorCode::not_found, "no .metadata is here").at_path(store.name());
  for (int rank = 0; found.contains(rank_metadata(rank)); ++rank) {
    files.push_back(found.at(rank_metadata(rank)));
  }
  if (files.size() != found.size()) {
    throw Error(ErrorCode::incomplete, "there are " + std::to_string(found.size()) +
                                           " files __{rank}.metadata, but not that of rank " +
                                           std::to_string(files.size()))
        .at_path(store.name());
  }
  return files;
}

dcp::Metadata merged_metadata(const Store& store, const std::vector<ObjectInfo>& files) {
  std::vector<dcp::Metadata> ranks;
  ranks.reserve(files.size());
  for (const ObjectInfo& file : files) ranks.push_back(read_dcp_metadata(store, file.name));
  try {
    return dcp::merge(std::move(ranks));
  } catch (Error& error) {
    throw error.at_path(store.name());
  }
}

// What a directory's metadata says, and the files that say it.
struct FoundMetadata {
  std::vector<ObjectInfo> files;
  std::uint64_t end = 0;  // digest_of_end() of the first of them
  dcp::Metadata metadata;
  bool merged = false;  // from files of ranks: there is no `.metadata`
};

// `.metadata` comes first where both are, as for PyTorch's reader.
FoundMetadata find_metadata(const Store& store) {
  if (store.exists(kDcpMetadata)) {
    const auto file = store.open(kDcpMetadata);
    return {{{std::string(kDcpMetadata), file->size()}},
            digest_of_end(*file),
            read_dcp_metadata(*file),
            false};
  }
  std::vector<ObjectInfo> files = rank_metadata_files(store);
  dcp::Metadata metadata = merged_metadata(store, files);
  const std::uint64_t end = digest_of_end(*store.open(files.front().name));
  return {std::move(files), end, std::move(metadata), true};
}

// The numbers of a tensor's chunks, without those that give it nothing.
std::vector<std::size_t> needed_chunks(const dcp::Entry& entry) {
  std::vector<std::size_t> needed;
  needed.reserve(entry.chunks.size());
  for (std::size_t i = 0; i < entry.chunks.size(); ++i) {
    if (!is_needless(entry.chunks.box_sizes(i), entry.shape, needed.empty())) needed.push_back(i);
  }
  return needed;
}

// The same, and without those of a tensor without elements whose files are missing: nobody reads
// anything of it. The files are told all the same.
std::vector<std::size_t> chunks_to_read(const dcp::Entry& entry, DataFiles& files) {
  std::vector<std::size_t> chunks = needed_chunks(entry);
  if (numel(entry.shape) == 0) {
    std::erase_if(chunks,
                  [&](std::size_t chunk) { return !files.is_here(entry.chunks.item(chunk)); });
  }
  return chunks;
}

Shape shape_of(std::span<const std::int64_t> numbers) {
  return {numbers.begin(), numbers.end()};
}

void require_covered(const dcp::Entry& entry, const std::vector<std::size_t>& chunks) {
  std::vector<std::int64_t> row(2 * entry.shape.size());
  const auto row_of = [&](std::size_t index) {
    const auto offsets = entry.chunks.box_offsets(chunks[index]);
    std::ranges::copy(entry.chunks.box_sizes(chunks[index]),
                      std::ranges::copy(offsets, row.begin()).out);
    return std::span<const std::int64_t>(row);
  };
  if (is_row_of_slices(entry.shape, chunks.size(), row_of)) return;
  std::vector<Slice> slices;
  slices.reserve(chunks.size());
  for (const std::size_t chunk : chunks) {
    slices.emplace_back(
        Box{shape_of(entry.chunks.box_offsets(chunk)), shape_of(entry.chunks.box_sizes(chunk))});
  }
  require_covered_once(entry.shape, slices);
}

void add_tensor(const dcp::Entry& entry, DataFiles& files, CatalogWriter& catalog) {
  catalog.add_tensor(entry);
  const std::vector<std::size_t> needed = chunks_to_read(entry, files);
  auto next = needed.begin();
  for (std::size_t i = 0; i < entry.chunks.size(); ++i) {
    if (next == needed.end() || *next != i) {
      files.pass_over(entry.chunks.item(i));
      continue;
    }
    ++next;
    catalog.add_chunk(entry.chunks.box_offsets(i), entry.chunks.box_sizes(i),
                      files.chunk(entry, i));
  }
}

// Tensors inside of a value are views of their item's file.
void add_value(const dcp::Entry& entry, DataFiles& files, CatalogWriter& catalog) {
  const ItemRange place = files.item(entry);
  if (!files.is_here(view_of(entry.item)) || files.is_cut()) return catalog.add_item(entry, place);
  const Value value = read_value(files.source(place.file), place);
  if (value.is(Value::Kind::tensor) || !inner_tensors(value).empty()) {
    catalog.add_item(entry, place);
  } else {
    catalog.add_value(entry, pickle::write(value));
  }
}

template <class Work>
void for_each_entry(const dcp::Metadata& metadata, const Work& work) {
  for (const dcp::Entry& entry : metadata.entries) {
    try {
      work(entry);
    } catch (Error& error) {
      throw error.at_key(entry.name);
    }
  }
}

void prove(const dcp::Metadata& metadata, DataFiles& files, const std::string& path) {
  files.require_apart();
  try {
    for_each_entry(metadata, [](const dcp::Entry& entry) {
      if (entry.is_tensor) require_covered(entry, needed_chunks(entry));
    });
  } catch (Error& error) {
    throw error.at_path(path);
  }
}

// Takes the digests of these files out of `digests`.
void add_digests(std::vector<CatalogFile>& files, DigestsByName& digests) {
  for (CatalogFile& file : files) {
    if (auto of_file = digests.extract(file.info.name)) file.digests = std::move(of_file.mapped());
  }
}

// Whether all bytes of the entry that count lie in files that are there. Asks for each of them, so
// that every missing file is told.
bool is_here(const dcp::Entry& entry, DataFiles& files) {
  if (!entry.is_tensor) return files.is_here(view_of(entry.item));
  const std::vector<std::size_t> needed = chunks_to_read(entry, files);
  return std::ranges::count_if(needed, [&](std::size_t chunk) {
           return !files.is_here(entry.chunks.item(chunk));
         }) == 0;
}

// Puts the entries into the catalog, and answers the names of those that are left out.
std::vector<std::string> add_entries(const dcp::Metadata& metadata, bool partial, DataFiles& files,
                                     CatalogWriter& catalog) {
  std::vector<std::string> left;
  for_each_entry(metadata, [&](const dcp::Entry& entry) {
    if (partial && !is_here(entry, files)) {
      files.leave_out(entry);
      left.push_back(entry.name);
    } else if (entry.is_tensor) {
      add_tensor(entry, files, catalog);
    } else {
      add_value(entry, files, catalog);
    }
  });
  files.require_long_enough(metadata);
  return left;
}

// What looks like damage, or like files that are missing, may be the work of saves that have
// replaced the checkpoint meanwhile (fault-rows C04).
void require_not_replaced(const Store& store, const CatalogHead& head) {
  bool is_replaced = false;
  try {
    is_replaced = !is_metadata_of(head, *store.open(head.metadata.front().name));
  } catch (const Error&) {
    return;  // the first error says more
  }
  if (!is_replaced) return;
  throw Error(ErrorCode::conflict, "the checkpoint was replaced while it was opened")
      .at_path(store.name());
}

// `head` has what the metadata files say; the rest is found here.
Bytes catalog_of(const dcp::Metadata& metadata, bool merged, std::shared_ptr<Store> store,
                 CatalogHead& head, bool partial) {
  if (!merged) {
    if (store->exists(rank_metadata(0)))
      head.warnings.emplace_back("__{rank}.metadata files are passed over for .metadata");
    DcpGuard guard = guard_dcp(store, metadata, head.warnings);
    store = std::move(guard.store);
    head.digests = *guard.digests;
    head.types = std::move(guard.types);
  }
  DataFiles files(store);
  CatalogWriter catalog;
  const std::vector<std::string> left = add_entries(metadata, partial, files, catalog);
  prove(metadata, files, store->name());
  std::vector<CatalogFile> used = files.used();
  head.missing = files.missing();
  head.idle = files.idle();
  if (auto warning = warning_of_missing(head.missing, left))
    head.warnings.push_back(*std::move(warning));
  if (merged) {
    // The replicas of higher ranks are not read: their files go on.
    head.world_size = static_cast<int>(head.metadata.size());
  } else {
    head.world_size = world_size_of(used, head.missing);
    for (std::string& warning : files.warnings()) head.warnings.push_back(std::move(warning));
  }
  add_digests(used, head.digests);
  return catalog.finish(head, used);
}

}  // namespace

bool is_needless(std::span<const std::int64_t> sizes, const Shape& shape, bool first) {
  return std::ranges::count(sizes, 0) > 0 && (numel(shape) > 0 || !first);
}

Bytes read_catalog(const std::shared_ptr<Store>& store, bool partial) {
  FoundMetadata found = find_metadata(*store);
  CatalogHead head;
  head.version = found.metadata.version;
  head.save_id = found.metadata.save_id;
  head.warnings = found.metadata.warnings;
  head.metadata = std::move(found.files);
  head.metadata_end = found.end;
  Bytes catalog;
  try {
    catalog = catalog_of(found.metadata, found.merged, store, head, partial);
  } catch (const Error&) {
    require_not_replaced(*store, head);
    throw;
  }
  if (!head.missing.empty()) require_not_replaced(*store, head);
  return catalog;
}

}  // namespace tessera
