#include "checkpoint/open/indexed_set.h"

#include <algorithm>
#include <iterator>
#include <unordered_set>

#include "base/text.h"
#include "checkpoint/open/directory.h"
#include "checkpoint/open/open.h"
#include "checkpoint/open/set_choice.h"
#include "checkpoint/read/missing.h"
#include "storage/storage.h"
#include "tessera/error.h"
#include "value/inner_tensors.h"
#include "value/render.h"

namespace tessera {
namespace {

constexpr std::string_view kIndexEnd = ".index.json";

// Takes away the tensors that the index names.
void strike_out(const safetensors::Index& index, const IndexedFiles& files, Holders& holders,
                const Checkpoint& checkpoint) {
  for (const auto& [name, file] : index.files) {
    if (files.missing.contains(file)) {
      holders.erase(name);  // of one in shards, others may be here
      continue;
    }
    const auto holder = holders.find(name);
    if (holder != holders.end() && holder->second == file) {
      holders.erase(holder);
      continue;
    }
    throw Error(ErrorCode::incomplete,
                "the index says that the tensor is in this file; --ignore-index reads what the "
                "files say")
        .at_path(checkpoint.path + "/" + file)
        .at_key(name);
  }
}

// Tensors inside of values are in the files under names of their own.
bool is_in_files(const Leaf& leaf, const safetensors::Index& index) {
  return !leaf.value.is(Value::Kind::tensor) || index.files.contains(leaf.name);
}

// Bytes of the tensors that an index is about: each by itself, and of what they are views of.
struct Totals {
  std::uint64_t tensors = 0, storages = 0;
};

Totals totals_of(const safetensors::Index& index, std::vector<Leaf> leaves) {
  std::erase_if(leaves, [&index](const Leaf& leaf) { return !is_in_files(leaf, index); });
  Totals totals;
  std::unordered_set<const Storage*> seen;
  for (const auto& [name, value] : all_tensors(leaves)) {
    const Tensor& tensor = value.as_tensor();
    totals.tensors += byte_size(tensor.dtype, tensor.shape);
    for (const Piece& piece : tensor.pieces) {
      if (piece.storage && seen.insert(piece.storage.get()).second)
        totals.storages += piece.storage->size;
    }
  }
  return totals;
}

}  // namespace

bool is_telling(std::string_view name, const SetNames& names) {
  if (name.empty() || name.find('/') != std::string_view::npos) return false;
  return name == names.usual || name.ends_with(names.index_suffix) ||
         std::ranges::find(names.others, name) != names.others.end();
}

std::string find_index(const std::vector<ObjectInfo>& files, const SetNames& names,
                       const Store& store) {
  std::vector<std::string> found;
  const bool has_own = has_own_form(files, names);
  for (const ObjectInfo& file : files) {
    if (has_own && is_other_form(file.name)) continue;
    if (file.name == names.usual_index) return file.name;
    if (file.name.ends_with(names.index_suffix)) found.push_back(file.name);
  }
  if (found.size() < 2) return found.empty() ? "" : found.front();
  throw Error(ErrorCode::conflict, "several indices: open the one that you mean")
      .at_path(store.name());
}

std::string single_of(const std::string& index) {
  return index.substr(0, index.size() - std::min(index.size(), kIndexEnd.size()));
}

safetensors::Index read_set_index(const Store& store, const std::string& name) {
  const auto source = store.open(name);
  try {
    return safetensors::read_index(read_all(*source, safetensors::kIndexLimit));
  } catch (Error& error) {
    throw error.at_path(source->name());
  }
}

IndexedFiles files_in(const safetensors::Index& index, const std::vector<ObjectInfo>& present,
                      const Store& store, const std::function<std::string()>& advice) {
  IndexedFiles files;
  NearObjects objects(store, present);
  for (const auto& [tensor, name] : index.files) {
    if (const ObjectInfo* file = objects.find(name)) {
      files.here.emplace(name, *file);
    } else {
      files.missing.insert(name);
    }
  }
  if (!files.here.empty() || files.missing.empty()) return files;
  const auto& [tensor, name] = *index.files.begin();
  const std::size_t count = files.missing.size();
  throw Error(ErrorCode::incomplete, (count == 1 ? "the file that the index names is missing"
                                                 : "all " + std::to_string(count) +
                                                       " files that the index names are missing") +
                                         advice())
      .at_path(store.name() + "/" + name)
      .at_key(tensor);
}

bool is_superseded(const safetensors::Index& index, const std::string& tensor,
                   const std::string& file) {
  const auto found = index.files.find(tensor);
  return found != index.files.end() && found->second != file;
}

void remark_superseded(const Superseded& superseded, Checkpoint& checkpoint) {
  std::vector<FileRow> rows;
  for (const auto& [file, tensors] : superseded) {
    Named named;
    for (const std::string& tensor : tensors) named.add(printable(tensor, 200));
    rows.push_back({file, FileState::used, "superseded, by what the index says: " + named.text()});
  }
  remark(std::move(rows), checkpoint);
}

MissingFiles missing_sources(const std::set<std::string>& names,
                             const std::shared_ptr<const Store>& store) {
  MissingFiles sources;
  for (const std::string& name : names)
    sources[name] = std::make_shared<LazySource>(store, ObjectInfo{name, 1}, true, nullptr);
  return sources;
}

void add_missing(const safetensors::Index& index, const MissingFiles& missing,
                 Checkpoint& checkpoint) {
  if (missing.empty()) return;
  for (const auto& [name, source] : missing) checkpoint.remarks.push_back(missing_row(name));
  std::set<std::string_view> known;
  for (const Leaf& leaf : checkpoint.leaves) known.insert(leaf.name);
  std::vector<Leaf> leaves;
  for (const auto& [tensor, name] : index.files) {
    const auto source = missing.find(name);
    if (source == missing.end() || known.contains(tensor)) continue;
    leaves.push_back({tensor, Path{tensor}, missing_value(source->second)});
  }
  std::ranges::move(leaves, std::back_inserter(checkpoint.leaves));
}

void settle_missing(bool partial, Checkpoint& checkpoint) {
  std::vector<std::string> files, left;
  for (const FileRow& row : checkpoint.remarks) {
    if (row.state == FileState::missing) files.push_back(row.name);
  }
  if (files.empty()) return;
  if (partial) {
    std::erase_if(checkpoint.leaves, [&left](const Leaf& leaf) {
      if (missing_file(leaf.value) == nullptr) return false;
      left.push_back(leaf.name);
      return true;
    });
  }
  if (auto warning = warning_of_missing(files, left))
    checkpoint.warnings.push_back(*std::move(warning));
}

void check_against(const safetensors::Index& index, const IndexedFiles& files, Holders holders,
                   Checkpoint& checkpoint) {
  strike_out(index, files, holders, checkpoint);
  Named named;
  for (const auto& [name, file] : holders) named.add(printable(name));
  if (named.count() > 0) {
    checkpoint.warnings.push_back("the index does not name a tensor that the files have: " +
                                  named.text());
  }
  if (!files.missing.empty()) return;  // nobody knows how many bytes their tensors have
  if (const auto wrong = index_total_fault(index, checkpoint.leaves)) {
    checkpoint.warnings.push_back(*wrong);
  }
}

void add_index(const std::string& name, const std::vector<ObjectInfo>& present,
               const IndexedFiles& named, const SetNames& names, Checkpoint& checkpoint) {
  const auto own = std::ranges::find(present, name, &ObjectInfo::name);
  if (own == present.end()) {
    throw Error(ErrorCode::not_found, "the index is not in its directory").at_path(checkpoint.path);
  }
  checkpoint.files.insert(checkpoint.files.begin(), *own);
  std::vector<FileRow> rows;
  for (const ObjectInfo& file : present) {
    if (file.name.ends_with(names.suffix) && !named.here.contains(file.name))
      rows.push_back(
          {file.name, FileState::not_part, "not in the index and passed over", file.size});
  }
  remark(std::move(rows), checkpoint);
}

// PyTorch's files keep what is shared once, and huggingface counts it once.
std::optional<std::string> index_total_fault(const safetensors::Index& index,
                                             const std::vector<Leaf>& leaves) {
  if (!index.total_size) return std::nullopt;
  const Totals totals = totals_of(index, leaves);
  if (is_one_of(*index.total_size, totals.tensors, totals.storages)) return std::nullopt;
  return "the index says that the tensors have " + std::to_string(*index.total_size) +
         " bytes, they have " + std::to_string(totals.tensors);
}

// A set of files of torch.save with an index, as huggingface wrote it before safetensors
// (docs/formats/torch-save.md).

namespace {

// What the files of a set have together.
struct Pairs {
  std::vector<Value::Pair> all;
  Holders holders;
  Superseded superseded;
};

// The pairs and holders of one file are added, without what the index has elsewhere. What is no
// tensor is in one file at most, too.
void add_pairs(const Value& tree, const std::string& file, const std::string& path,
               const safetensors::Index& index, Pairs& pairs) {
  if (!tree.is(Value::Kind::dict)) {
    throw Error(ErrorCode::mismatch,
                "a file of a set holds " + std::string(describe(tree.kind())) + ", expected a dict")
        .at_path(path);
  }
  std::vector<Value::Pair> kept;
  for (const Value::Pair& pair : tree.pairs()) {
    const bool is_elsewhere =
        pair.first.is(Value::Kind::string) && is_superseded(index, pair.first.as_string(), file);
    if (is_elsewhere) {
      pairs.superseded[file].push_back(pair.first.as_string());
    } else {
      kept.push_back(pair);
    }
  }
  for (const Leaf& leaf : leaves_of(Value::dict(kept))) {
    const auto [holder, fresh] = pairs.holders.emplace(leaf.name, file);
    if (fresh) continue;
    throw Error(ErrorCode::corrupt, "the tensor is in " + holder->second + " and in " + file)
        .at_path(path)
        .at_key(leaf.name);
  }
  std::ranges::move(kept, std::back_inserter(pairs.all));
}

// What is no tensor need not be in the index.
void leave_out_values(const std::vector<Leaf>& leaves, const safetensors::Index& index,
                      Holders& holders) {
  for (const Leaf& leaf : leaves) {
    if (!leaf.value.is(Value::Kind::tensor) && !index.files.contains(leaf.name))
      holders.erase(leaf.name);
  }
}

// By file. All files that are cut short are told.
std::map<std::string, Value> trees_of(const std::shared_ptr<Store>& store, const FileByName& files,
                                      const OpenOptions& options, Checkpoint& checkpoint) {
  std::map<std::string, Value> trees;
  std::vector<Error> cut;
  const auto open = std::make_shared<OpenFiles>();
  for (const auto& [name, file] : files) {
    try {
      const auto source =
          without_tail(std::make_shared<LazySource>(store, file, open), options, checkpoint);
      trees.emplace(
          name, read_torch_tree(source, store->name() + "/" + name, options, checkpoint.warnings));
    } catch (const Error& error) {
      if (error.code() != ErrorCode::incomplete) throw;
      cut.push_back(error);
    }
  }
  if (!cut.empty()) throw all_of(cut);
  return trees;
}

// `present`: what is beside the index.
Checkpoint open_set(const std::shared_ptr<Store>& store, const std::string& name,
                    const std::vector<ObjectInfo>& present, const OpenOptions& options) {
  const safetensors::Index index = read_set_index(*store, name);
  const IndexedFiles named = files_in(index, present, *store, [] { return std::string(); });
  Checkpoint checkpoint;
  checkpoint.kind = CheckpointKind::torch_file;
  checkpoint.path = store->name();
  Pairs pairs;
  for (const auto& [file_name, tree] : trees_of(store, named.here, options, checkpoint)) {
    add_pairs(tree, file_name, store->name() + "/" + file_name, index, pairs);
    checkpoint.files.push_back(named.here.at(file_name));
  }
  checkpoint.root = Value::dict(std::move(pairs.all));
  checkpoint.leaves = leaves_of(*checkpoint.root);
  checkpoint.has_types = true;
  checkpoint.store = store;
  leave_out_values(checkpoint.leaves, index, pairs.holders);
  check_against(index, named, std::move(pairs.holders), checkpoint);
  remark_superseded(pairs.superseded, checkpoint);
  add_index(name, present, named, kTorchSet, checkpoint);
  add_missing(index, missing_sources(named.missing, store), checkpoint);
  if (!named.missing.empty() && !options.partial) checkpoint.root.reset();
  settle_missing(options.partial, checkpoint);
  require_coverage(checkpoint);
  return checkpoint;
}

}  // namespace

bool has_torch_set(const std::vector<ObjectInfo>& files) {
  return std::ranges::any_of(
      files, [](const ObjectInfo& file) { return is_telling(file.name, kTorchSet); });
}

Checkpoint open_torch_index(const std::shared_ptr<Store>& store, const std::string& index,
                            const OpenOptions& options) {
  return open_set(store, index, store->list_level(), options);
}

Checkpoint open_torch_directory(const std::shared_ptr<Store>& store,
                                const std::vector<ObjectInfo>& decided,
                                const OpenOptions& options) {
  SetChoice choice = choose_set(decided, kTorchSet, *store, options);
  if (choice.index.empty() && choice.files.size() != 1) {
    throw Error(ErrorCode::unsupported, "it has " + std::to_string(choice.files.size()) + " " +
                                            std::string(kTorchSet.suffix) +
                                            " files: without an index one is opened by its name")
        .at_path(store->name());
  }
  Checkpoint checkpoint = choice.index.empty()
                              ? open_torch(store, choice.files.at(0), options)
                              : open_set(store, choice.index, choice.near, options);
  checkpoint.path = store->name();  // of whatever else lies there something is said, too
  if (!choice.missing.empty()) {
    remark_missing(missing_sources(choice.missing, store), checkpoint);
    settle_missing(options.partial, checkpoint);
  }
  for (const ObjectInfo& file : choice.near) {
    if (file.name.ends_with(kSafetensorsSet.suffix) ||
        file.name.ends_with(kSafetensorsSet.index_suffix))
      choice.remarks.push_back({file.name, FileState::not_part, kBeside, file.size});
  }
  remark(std::move(choice.remarks), checkpoint);
  return checkpoint;
}

}  // namespace tessera
