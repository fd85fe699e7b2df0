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
#include "checkpoint/open/directory.h"
#include "checkpoint/open/indexed_set.h"
#include "checkpoint/open/open.h"
#include "checkpoint/open/set_choice.h"
#include "checkpoint/open/tree.h"
#include "checkpoint/open/tree_json.h"
#include "checkpoint/read/missing.h"
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
  file.header = safetensors::read_header(*file.source, options.header_limit, true);
  if (file.header.trailing > 0 && !accepts(options, kTrailingBytes)) {
    throw Error(ErrorCode::corrupt, std::to_string(file.header.trailing) +
                                        " bytes after the last tensor; --accept trailing-bytes "
                                        "passes over them")
        .at_path(file.source->name())
        .at_offset(info.size - file.header.trailing);
  }
  // Digests are of the file without what is passed over.
  if (file.header.trailing > 0)
    file.source = slice_source(file.source, 0, info.size - file.header.trailing);
  file.source = guard_safetensors(file.source, file.header);
  try {
    file.offsets = sharding_offsets(file.header.metadata);
  } catch (Error& error) {
    throw error.at_path(file.source->name());
  }
  return file;
}

// `index`: decides where it names a tensor that lies in several files; null: there is none.
std::vector<Found> by_name(const std::vector<SetFile>& set, const safetensors::Index* index,
                           Superseded& superseded) {
  std::vector<Found> all;
  std::unordered_map<std::string_view, std::size_t> known;
  for (const SetFile& file : set) {
    for (const safetensors::Entry& entry : file.header.entries) {
      const bool shard = file.offsets.contains(entry.name);
      if (index != nullptr && !shard && is_superseded(*index, entry.name, file.info.name)) {
        superseded[file.info.name].push_back(entry.name);
        continue;
      }
      const auto [at, fresh] = known.try_emplace(entry.name, all.size());
      if (fresh) all.push_back({entry.name, {}, {}});
      Found& found = all[at->second];
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

// An index, and the files that it names; null: the files are all there is to a set. `missing`: that
// it names, or that the others tell of. `of_shards`: that an index names which is ignored: they
// matter to tensors in shards alone.
struct IndexOfSet {
  const safetensors::Index* index = nullptr;
  const IndexedFiles* files = nullptr;
  MissingFiles missing = {};
  MissingFiles of_shards = {};
};

// Of shards nobody knows whether those that are here reach to the tensor's end where a file is
// missing: it may lie in any of them.
Value part_of_missing(const std::string& name, const IndexOfSet& by) {
  auto at = by.missing.begin();
  if (by.index != nullptr) {
    const auto named = by.index->files.find(name);
    if (named != by.index->files.end() && by.missing.contains(named->second))
      at = by.missing.find(named->second);
  }
  return missing_value(at->second);
}

Leaf leaf_of(const Found& found, const IndexOfSet& by) {
  require_once(found, by.index != nullptr);
  if (found.whole.empty() && !by.missing.empty())
    return {found.name, Path{found.name}, part_of_missing(found.name, by)};
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

// All files that are cut short are told.
std::vector<SetFile> read_set(const std::shared_ptr<Store>& store,
                              const std::vector<ObjectInfo>& files, const OpenOptions& options) {
  std::vector<SetFile> set;
  set.reserve(files.size());
  std::vector<Error> cut;
  const auto open = std::make_shared<OpenFiles>();
  for (const ObjectInfo& file : files) {
    try {
      set.push_back(read_set_file(store, file, options, open));
    } catch (const Error& error) {
      if (error.code() != ErrorCode::incomplete) throw;
      cut.push_back(error);
    }
  }
  if (!cut.empty()) throw all_of(cut);
  return set;
}

void add_leaves(const std::vector<Found>& all, const IndexOfSet& by, Checkpoint& checkpoint) {
  for (const Found& found : all) {
    try {
      checkpoint.leaves.push_back(leaf_of(found, by));
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

void add_leaves_of_set(const std::vector<SetFile>& set, const IndexOfSet& by,
                       Checkpoint& checkpoint) {
  Superseded superseded;
  const std::vector<Found> all = by_name(set, by.index, superseded);
  add_leaves(all, by, checkpoint);
  if (std::ranges::any_of(all, is_whole_and_sharded)) {
    checkpoint.warnings.emplace_back(
        "some tensors are there whole and in shards of ranks: the whole ones are read");
  }
  if (by.index == nullptr) return;
  check_against(*by.index, *by.files, holders_of(all), checkpoint);
  remark_superseded(superseded, checkpoint);
}

void remark_trailing(const std::vector<SetFile>& set, Checkpoint& checkpoint) {
  std::vector<FileRow> rows;
  for (const SetFile& file : set) {
    if (file.header.trailing == 0) continue;
    rows.push_back(
        {file.info.name, FileState::used,
         std::to_string(file.header.trailing) + " bytes after the last tensor are passed over",
         file.info.size});
  }
  remark(std::move(rows), checkpoint);
}

Checkpoint open_set(const std::shared_ptr<Store>& store, const std::vector<ObjectInfo>& files,
                    IndexOfSet by, const OpenOptions& options) {
  Checkpoint checkpoint;
  checkpoint.kind = CheckpointKind::safetensors;
  checkpoint.path = store->name();
  checkpoint.files = files;
  std::vector<SetFile> set = read_set(store, files, options);
  const auto has_shards = [](const SetFile& file) { return !file.offsets.empty(); };
  if (std::ranges::any_of(set, has_shards)) by.missing.merge(by.of_shards);
  if (set.size() == 1 && by.index == nullptr && set[0].offsets.empty()) {
    add_own_leaves(set[0], checkpoint);
  } else {
    add_leaves_of_set(set, by, checkpoint);
  }
  remark_trailing(set, checkpoint);
  if (by.index != nullptr) {
    add_missing(*by.index, by.missing, checkpoint);
  } else {
    remark_missing(by.missing, checkpoint);
  }
  add_noted(set, checkpoint);  // also of tensors in missing files
  for (const SetFile& file : set) add_metadata(file, checkpoint);
  settle_missing(options.partial, checkpoint);
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

std::string five_digits(int number) {
  const std::string digits = std::to_string(number);
  return std::string(5 - std::min<std::size_t>(5, digits.size()), '0') + digits;
}

// Without an index the names alone tell that a file of a set is missing, and nothing which tensors
// lie there. Some count from 0.
void require_all_numbers(const Store& store, const OpenOptions& options, SetChoice& choice) {
  for (const auto& [set, numbers] : numbers_of_sets(choice.files)) {
    const auto& [begin, count] = set;
    const auto name_of = [&begin = begin, &count = count](int number) {
      return begin + five_digits(number) + std::string(kOf) + five_digits(count) +
             std::string(kSafetensorsSuffix);
    };
    const int first = numbers.contains(0) ? 0 : 1, end = first + count;
    std::vector<std::string> missing;
    for (int number = first; number < end; ++number) {
      if (!numbers.contains(number)) missing.push_back(name_of(number));
    }
    const bool has_more = !numbers.empty() && *numbers.rbegin() >= end;
    if (missing.empty() && !has_more) continue;
    pass_over(missing,
              "there are " + std::to_string(numbers.size()) + " of the " + std::to_string(count) +
                  " files " + printable(begin) + "*",
              store, options, choice);
    for (auto number = numbers.lower_bound(end); number != numbers.end(); ++number)
      choice.remarks.push_back({name_of(*number), FileState::used, "its number is too large"});
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

// What is said where files of an index are missing and others lie there that have all of its
// tensors; empty: they do not.
std::string advice_on_others(const std::shared_ptr<Store>& store, const safetensors::Index& index,
                             const std::vector<ObjectInfo>& present, const OpenOptions& options) {
  std::set<std::string, std::less<>> named, found;
  for (const auto& [tensor, file] : index.files) named.insert(file);
  std::size_t files = 0;
  const auto open = std::make_shared<OpenFiles>();
  OpenOptions how = options;  // what else is wrong with them, and has a way on, is said then
  how.accept = {std::string(kTrailingBytes)};
  for (const ObjectInfo& info : present) {
    if (!info.name.ends_with(kSafetensorsSuffix) || named.contains(info.name)) continue;
    try {
      const SetFile file = read_set_file(store, info, how, open);
      ++files;
      for (const safetensors::Entry& entry : file.header.entries) {
        if (index.files.contains(entry.name)) found.insert(entry.name);
      }
    } catch (const Error&) {
      continue;  // what is wrong with a file that nothing names is nobody's concern
    }
  }
  if (found.empty() || found.size() != index.files.size()) return "";
  return "; " + std::to_string(files) + " other files here hold all " +
         std::to_string(found.size()) + " tensors: --ignore-index reads them";
}

// `present`: what is beside it.
Checkpoint open_index(const std::shared_ptr<Store>& store, const std::string& name,
                      const std::vector<ObjectInfo>& present, const OpenOptions& options) {
  const safetensors::Index index = read_set_index(*store, name);
  const auto advice = [&] { return advice_on_others(store, index, present, options); };
  const IndexedFiles named = files_in(index, present, *store, advice);
  std::vector<ObjectInfo> files;
  for (const auto& [file_name, file] : named.here) files.push_back(file);
  Checkpoint checkpoint =
      open_set(store, files, {&index, &named, missing_sources(named.missing, store)}, options);
  if (const std::string more = named.missing.empty() ? "" : advice(); !more.empty())
    checkpoint.warnings.push_back("files of the index are missing" + more);
  add_index(name, present, named, kSafetensorsSet, checkpoint);
  return checkpoint;
}

}  // namespace

Checkpoint open_safetensors(const std::shared_ptr<Store>& store,
                            const std::vector<ObjectInfo>& files, const OpenOptions& options) {
  return open_set(store, files, {}, options);
}

Checkpoint open_safetensors_index(const std::shared_ptr<Store>& store, const std::string& index,
                                  const OpenOptions& options) {
  return open_index(store, index, store->list_level(), options);
}

bool has_safetensors(const std::vector<ObjectInfo>& files) {
  // An adapter to a model of torch.save, or that in another form, is beside the model.
  const auto is_of_torch = [](const ObjectInfo& file) {
    return is_telling(file.name, kTorchSet) && !is_other_form(file.name);
  };
  if (std::ranges::any_of(files, is_of_torch) && !has_own_form(files, kSafetensorsSet))
    return false;
  return std::ranges::any_of(files, [](const ObjectInfo& file) {
    return file.name.find('/') == std::string::npos &&
           (file.name.ends_with(kSafetensorsSuffix) ||
            file.name.ends_with(kSafetensorsSet.index_suffix));
  });
}

Checkpoint open_safetensors_directory(const std::shared_ptr<Store>& store,
                                      const std::vector<ObjectInfo>& decided,
                                      const OpenOptions& options) {
  SetChoice choice = choose_set(decided, kSafetensorsSet, *store, options);
  Checkpoint checkpoint;
  if (!choice.index.empty()) {
    checkpoint = open_index(store, choice.index, choice.near, options);
  } else {
    if (choice.files.empty()) {
      throw Error(ErrorCode::not_found, "without the index nothing is left: there is no file *" +
                                            std::string(kSafetensorsSuffix))
          .at_path(store->name());
    }
    require_all_numbers(*store, options, choice);
    checkpoint = open_set(store, choice.files,
                          {nullptr, nullptr, missing_sources(choice.missing, store),
                           missing_sources(choice.ignored, store)},
                          options);
    checkpoint.world_size = ranks_of(choice.files);
  }
  for (const ObjectInfo& file : choice.near) {
    if (!is_telling(file.name, kTorchSet)) continue;
    if (is_other_form(file.name) && has_own_form(choice.near, kSafetensorsSet)) {
      choice.remarks.push_back({file.name, FileState::not_part, kBeside, file.size});
    } else {
      choice.remarks.push_back(
          {file.name, FileState::superseded, "safetensors files are read", file.size});
    }
  }
  remark(std::move(choice.remarks), checkpoint);
  return checkpoint;
}

}  // namespace tessera
