// One safetensors file, or a set: with an index as huggingface writes it, shards of ranks as
// PyTorch writes them, or simply all files of a directory (docs/formats/safetensors.md).
#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <unordered_map>

#include "base/numbers.h"
#include "base/text.h"
#include "checkpoint/dcp/read_catalog.h"
#include "checkpoint/open/indexed_set.h"
#include "checkpoint/open/open.h"
#include "checkpoint/open/tree.h"
#include "checkpoint/open/tree_json.h"
#include "checkpoint/read/safetensors_digests.h"
#include "format/safetensors/index.h"
#include "format/safetensors/safetensors.h"
#include "storage/lazy_source.h"
#include "tessera/error.h"
#include "value/render.h"

namespace tessera {
namespace {

constexpr std::string_view kSafetensorsSuffix = ".safetensors";
constexpr std::string_view kOf = "-of-";
constexpr std::string_view kRankShard = "shard-";

// One file of the set.
struct SetFile {
  ObjectInfo info;
  std::shared_ptr<const ByteSource> source;
  safetensors::Header header;
  std::map<std::string, Shape> offsets;  // of the tensors that are shards
};

// Everything that the files have under one name.
struct Found {
  std::string name;
  std::vector<std::pair<const SetFile*, const safetensors::Entry*>> whole;
  std::vector<std::pair<const SetFile*, const safetensors::Entry*>> shards;
};

SetFile read_set_file(const std::shared_ptr<Store>& store, const ObjectInfo& info,
                      const OpenOptions& options, const std::shared_ptr<OpenFiles>& open) {
  SetFile file{info, std::make_shared<LazySource>(store, info, open), {}, {}};
  file.header = safetensors::read_header(*file.source, options.header_limit);
  file.source = guard_safetensors(file.source, file.header);
  try {
    file.offsets = sharding_offsets(file.header.metadata);
  } catch (Error& error) {
    throw error.at_path(file.source->name());
  }
  return file;
}

std::vector<Found> by_name(const std::vector<SetFile>& set) {
  std::vector<Found> all;
  std::unordered_map<std::string_view, std::size_t> known;
  for (const SetFile& file : set) {
    for (const safetensors::Entry& entry : file.header.entries) {
      const auto [at, fresh] = known.try_emplace(entry.name, all.size());
      if (fresh) all.push_back({entry.name, {}, {}});
      Found& found = all[at->second];
      const bool shard = file.offsets.contains(entry.name);
      (shard ? found.shards : found.whole).emplace_back(&file, &entry);
    }
  }
  return all;
}

Storage storage_of(const SetFile& file, const safetensors::Entry& entry) {
  Storage storage;
  storage.source = file.source;
  storage.offset = file.header.data_offset + entry.begin;
  storage.size = entry.end - entry.begin;
  storage.dtype = entry.dtype;
  return storage;
}

Piece piece_of(const safetensors::Entry& entry, std::shared_ptr<Storage> storage, Shape offsets) {
  return Piece{Box{std::move(offsets), entry.shape}, std::move(storage), 0, {}, -1};
}

// `tensor` has the dtype and the number of dimensions of the first shard.
void require_shard_of(const Tensor& tensor, const SetFile& file, const safetensors::Entry& entry) {
  const Shape& offsets = file.offsets.at(entry.name);
  if (entry.dtype == tensor.dtype && entry.shape.size() == tensor.shape.size() &&
      offsets.size() == tensor.shape.size()) {
    return;
  }
  throw Error(ErrorCode::corrupt, "a shard of " + std::string(to_string(entry.dtype)) + " " +
                                      to_string(entry.shape) + " at " + to_string(offsets) +
                                      " among others of " + std::string(to_string(tensor.dtype)))
      .at_path(file.source->name());
}

void extend(Shape& shape, const Shape& offsets, const Shape& sizes) {
  for (std::size_t d = 0; d < shape.size(); ++d) {
    shape[d] = std::max(shape[d], checked_add(offsets[d], sizes[d]));
  }
}

// The shards of one tensor; its shape is what they reach to.
Tensor sharded_tensor(const Found& found) {
  Tensor tensor;
  tensor.dtype = found.shards.front().second->dtype;
  tensor.shape.assign(found.shards.front().second->shape.size(), 0);
  for (const auto& [file, entry] : found.shards) {
    require_shard_of(tensor, *file, *entry);
    extend(tensor.shape, file->offsets.at(entry->name), entry->shape);
  }
  for (const auto& [file, entry] : found.shards) {
    if (is_needless(entry->shape, tensor.shape, tensor.pieces.empty())) continue;
    tensor.pieces.push_back(piece_of(*entry, std::make_shared<Storage>(storage_of(*file, *entry)),
                                     file->offsets.at(entry->name)));
  }
  return tensor;
}

void require_once(const Found& found, bool indexed) {
  if (found.whole.size() <= 1) return;
  // An index says that every name is in one file.
  throw Error(indexed ? ErrorCode::corrupt : ErrorCode::conflict,
              "the tensor is in " + found.whole[0].first->info.name + " and in " +
                  found.whole[1].first->info.name);
}

Tensor whole_tensor(const safetensors::Entry& entry, std::shared_ptr<Storage> storage) {
  Tensor tensor;
  tensor.dtype = entry.dtype;
  tensor.shape = entry.shape;
  tensor.pieces.push_back(piece_of(entry, std::move(storage), Shape(entry.shape.size(), 0)));
  return tensor;
}

Leaf named_leaf(std::string name, Tensor tensor) {
  Path path;
  path.emplace_back(name);
  return {std::move(name), std::move(path), Value(std::move(tensor))};
}

Leaf leaf_of(const Found& found, bool indexed) {
  require_once(found, indexed);
  if (found.whole.empty()) return named_leaf(found.name, sharded_tensor(found));
  const auto& [file, entry] = found.whole.front();
  auto storage = std::make_shared<Storage>(storage_of(*file, *entry));
  return named_leaf(found.name, whole_tensor(*entry, std::move(storage)));
}

void add_noted(const std::vector<SetFile>& set, Checkpoint& checkpoint) {
  Notes notes(checkpoint.leaves);
  for (const SetFile& file : set) notes.add(file.header.metadata);
  std::vector<Leaf> noted = notes.take();
  std::ranges::move(noted, std::back_inserter(checkpoint.leaves));
  std::vector<std::string> doubts = notes.take_doubts();
  std::ranges::move(doubts, std::back_inserter(checkpoint.warnings));
}

// A tensor in shards has several.
Holders holders_of(const std::vector<Found>& all) {
  Holders holders;
  for (const Found& found : all) {
    const auto& in = found.whole.empty() ? found.shards : found.whole;
    holders.emplace(found.name, in.front().first->info.name);
  }
  return holders;
}

void add_metadata(const SetFile& file, Checkpoint& checkpoint) {
  for (const auto& [key, value] : file.header.metadata) {
    if (!is_about_files(key)) checkpoint.metadata.emplace(key, value);
  }
  try {
    const bool types = add_from_metadata(file.header.metadata, checkpoint.leaves);
    checkpoint.has_types = checkpoint.has_types || types;
  } catch (Error& error) {
    throw error.at_path(file.source->name());
  }
}

std::vector<SetFile> read_set(const std::shared_ptr<Store>& store,
                              const std::vector<ObjectInfo>& files, const OpenOptions& options) {
  std::vector<SetFile> set;
  set.reserve(files.size());
  const auto open = std::make_shared<OpenFiles>();
  for (const ObjectInfo& file : files) set.push_back(read_set_file(store, file, options, open));
  return set;
}

void add_leaves(const std::vector<Found>& all, bool indexed, Checkpoint& checkpoint) {
  for (const Found& found : all) {
    try {
      checkpoint.leaves.push_back(leaf_of(found, indexed));
    } catch (Error& error) {
      throw error.at_path(checkpoint.path).at_key(found.name);
    }
  }
}

// The file is all there is, without shards. Its header has no name twice, so nothing has to be
// looked up; names move to their leaves. Storages are made at once: allocations are most of the
// time.
void add_own_leaves(SetFile& file, Checkpoint& checkpoint) {
  std::vector<safetensors::Entry>& entries = file.header.entries;
  const auto storages = std::make_shared<std::vector<Storage>>();
  storages->reserve(entries.size());  // so that each stays where it is
  checkpoint.leaves.reserve(entries.size());
  for (safetensors::Entry& entry : entries) {
    Storage& storage = storages->emplace_back(storage_of(file, entry));
    Tensor tensor = whole_tensor(entry, std::shared_ptr<Storage>(storages, &storage));
    checkpoint.leaves.push_back(named_leaf(std::move(entry.name), std::move(tensor)));
  }
}

bool is_whole_and_sharded(const Found& found) {
  return !found.whole.empty() && !found.shards.empty();
}

void add_leaves_of_set(const std::vector<SetFile>& set, const safetensors::Index* index,
                       Checkpoint& checkpoint) {
  const std::vector<Found> all = by_name(set);
  add_leaves(all, index != nullptr, checkpoint);
  if (std::ranges::any_of(all, is_whole_and_sharded)) {
    checkpoint.warnings.emplace_back(
        "some tensors are there whole and in shards of ranks: the whole ones are read");
  }
  if (index != nullptr) check_against(*index, holders_of(all), checkpoint);
}

// `index` null: the files are all there is to it.
Checkpoint open_set(const std::shared_ptr<Store>& store, const std::vector<ObjectInfo>& files,
                    const safetensors::Index* index, const OpenOptions& options) {
  Checkpoint checkpoint;
  checkpoint.kind = CheckpointKind::safetensors;
  checkpoint.path = store->name();
  checkpoint.files = files;
  std::vector<SetFile> set = read_set(store, files, options);
  if (set.size() == 1 && index == nullptr && set[0].offsets.empty()) {
    add_own_leaves(set[0], checkpoint);
  } else {
    add_leaves_of_set(set, index, checkpoint);
  }
  add_noted(set, checkpoint);
  for (const SetFile& file : set) add_metadata(file, checkpoint);
  warn_of_holes(fill_holes(checkpoint.leaves), checkpoint.warnings);
  checkpoint.store = store;
  require_coverage(checkpoint);
  return checkpoint;
}

// NAME-00002-of-00005.safetensors: 2 and 5; zeros for other names. DCP's rank shards count in two
// ways, and each file may be left out.
std::pair<int, int> number_in_set(std::string_view name) {
  constexpr std::string_view kTail = "00001-of-00001.safetensors";
  constexpr std::size_t kDigits = 5;
  if (name.size() <= kTail.size() || name.starts_with(kRankShard)) return {0, 0};
  name.remove_prefix(name.size() - kTail.size());
  const std::string_view between = name.substr(kDigits, kOf.size());
  const std::string_view rest = name.substr(kDigits + kOf.size());
  if (between != kOf || rest.substr(kDigits) != kSafetensorsSuffix) return {0, 0};
  const auto number = padded_number(name.substr(0, kDigits));
  const auto count = padded_number(rest.substr(0, kDigits));
  return number && count ? std::pair(*number, *count) : std::pair(0, 0);
}

// The numbers of the files of a set, by the beginning of their names and how many they should be.
using NumbersOfSets = std::map<std::pair<std::string, int>, std::set<int>>;

NumbersOfSets numbers_of_sets(const std::vector<ObjectInfo>& files) {
  NumbersOfSets sets;
  for (const ObjectInfo& file : files) {
    const auto [number, count] = number_in_set(file.name);
    if (count > 0) sets[{file.name.substr(0, file.name.rfind(kOf) - 5), count}].insert(number);
  }
  return sets;
}

// Without an index the names alone tell that a file of a set is missing.
void require_all_numbers(const std::vector<ObjectInfo>& files, const Store& store) {
  for (const auto& [set, numbers] : numbers_of_sets(files)) {
    if (numbers.size() == static_cast<std::size_t>(set.second)) continue;
    throw Error(ErrorCode::incomplete, "there are " + std::to_string(numbers.size()) + " of the " +
                                           std::to_string(set.second) + " files " +
                                           printable(set.first) + "*")
        .at_path(store.name());
  }
}

int ranks_of(const std::vector<ObjectInfo>& files) {
  int ranks = 0;
  for (const ObjectInfo& file : files) {
    if (!file.name.starts_with(kRankShard)) continue;
    const std::string_view rest = std::string_view(file.name).substr(kRankShard.size());
    const auto rank = padded_number(rest.substr(0, rest.find('-')));  // counted from 1
    ranks = std::max(ranks, rank.value_or(0));
  }
  return ranks;
}

// `present`: what is beside it.
Checkpoint open_index(const std::shared_ptr<Store>& store, const std::string& name,
                      const std::vector<ObjectInfo>& present, const OpenOptions& options) {
  const safetensors::Index index = read_set_index(*store, name);
  const FileByName named = files_in(index, present, *store);
  std::vector<ObjectInfo> files;
  for (const auto& [file_name, file] : named) files.push_back(file);
  Checkpoint checkpoint = open_set(store, files, &index, options);
  add_index(name, present, named, kSafetensorsSet, checkpoint);
  return checkpoint;
}

}  // namespace

Checkpoint open_safetensors(const std::shared_ptr<Store>& store,
                            const std::vector<ObjectInfo>& files, const OpenOptions& options) {
  return open_set(store, files, nullptr, options);
}

Checkpoint open_safetensors_index(const std::shared_ptr<Store>& store, const std::string& index,
                                  const OpenOptions& options) {
  return open_index(store, index, store->list_level(), options);
}

bool has_safetensors(const std::vector<ObjectInfo>& files) {
  return std::ranges::any_of(files, [](const ObjectInfo& file) {
    return file.name.find('/') == std::string::npos &&
           (file.name.ends_with(kSafetensorsSuffix) ||
            file.name.ends_with(kSafetensorsSet.index_suffix));
  });
}

Checkpoint open_safetensors_directory(const std::shared_ptr<Store>& store,
                                      const std::vector<ObjectInfo>& decided,
                                      const OpenOptions& options) {
  std::vector<ObjectInfo> files = decided;
  std::erase_if(files,
                [](const ObjectInfo& file) { return file.name.find('/') != std::string::npos; });
  const std::string index = find_index(files, kSafetensorsSet, *store);
  const std::string single = single_of(index);
  const auto lone = std::find_if(files.begin(), files.end(), [&](const ObjectInfo& file) {
    return !index.empty() && file.name == single;
  });
  // As huggingface's loaders have it: the one file comes first where both are.
  if (lone != files.end()) {
    Checkpoint checkpoint = open_set(store, {*lone}, nullptr, options);
    checkpoint.warnings.push_back(printable(index) + " is passed over for " + printable(single));
    return checkpoint;
  }
  if (!index.empty()) return open_index(store, index, files, options);
  std::erase_if(files,
                [](const ObjectInfo& file) { return !file.name.ends_with(kSafetensorsSuffix); });
  require_all_numbers(files, *store);
  Checkpoint checkpoint = open_set(store, files, nullptr, options);
  checkpoint.world_size = ranks_of(files);
  return checkpoint;
}

}  // namespace tessera
