#include "checkpoint/open/indexed_set.h"

#include <algorithm>
#include <unordered_set>

#include "base/text.h"
#include "checkpoint/open/open.h"
#include "storage/lazy_source.h"
#include "storage/storage.h"
#include "tessera/error.h"
#include "value/inner_tensors.h"
#include "value/render.h"

namespace tessera {
namespace {

constexpr std::string_view kIndexEnd = ".index.json";

// Takes away the tensors that the index names.
void strike_out(const safetensors::Index& index, Holders& holders, const Checkpoint& checkpoint) {
  for (const auto& [name, file] : index.files) {
    const auto holder = holders.find(name);
    if (holder != holders.end() && holder->second == file) {
      holders.erase(holder);
      continue;
    }
    throw Error(ErrorCode::incomplete, "the index says that the tensor is in this file")
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

std::string find_index(const std::vector<ObjectInfo>& files, const SetNames& names,
                       const Store& store) {
  std::vector<std::string> found;
  for (const ObjectInfo& file : files) {
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

FileByName files_in(const safetensors::Index& index, const std::vector<ObjectInfo>& present,
                    const Store& store) {
  FileByName named;
  NearObjects objects(store, present);
  for (const auto& [tensor, name] : index.files) {
    const ObjectInfo* file = objects.find(name);
    if (file == nullptr) {
      throw Error(ErrorCode::incomplete, "a file that the index names is missing")
          .at_path(store.name() + "/" + name)
          .at_key(tensor);
    }
    named.emplace(name, *file);
  }
  return named;
}

void check_against(const safetensors::Index& index, Holders holders, Checkpoint& checkpoint) {
  strike_out(index, holders, checkpoint);
  for (const auto& [name, file] : holders) {
    checkpoint.warnings.push_back("the index does not name a tensor that the files have: " +
                                  printable(name));
  }
  if (const auto wrong = index_total_fault(index, checkpoint.leaves)) {
    checkpoint.warnings.push_back(*wrong);
  }
}

void add_index(const std::string& name, const std::vector<ObjectInfo>& present,
               const FileByName& named, const SetNames& names, Checkpoint& checkpoint) {
  const auto own = std::ranges::find(present, name, &ObjectInfo::name);
  if (own == present.end()) {
    throw Error(ErrorCode::not_found, "the index is not in its directory").at_path(checkpoint.path);
  }
  checkpoint.files.insert(checkpoint.files.begin(), *own);
  const auto passed_over = std::ranges::count_if(present, [&](const ObjectInfo& file) {
    return file.name.ends_with(names.suffix) && !named.contains(file.name);
  });
  if (passed_over == 0) return;
  checkpoint.warnings.push_back(std::to_string(passed_over) + " " +
                                std::string(names.suffix.substr(1)) +
                                " files are not in the index and passed over");
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

// The pairs and holders of one file are added. What is no tensor is in one file at most, too.
void add_pairs(const Value& tree, const std::string& file, const std::string& path,
               std::vector<Value::Pair>& pairs, Holders& holders) {
  if (!tree.is(Value::Kind::dict)) {
    throw Error(ErrorCode::mismatch,
                "a file of a set holds " + std::string(describe(tree.kind())) + ", expected a dict")
        .at_path(path);
  }
  for (const Leaf& leaf : leaves_of(tree)) {
    const auto [holder, fresh] = holders.emplace(leaf.name, file);
    if (fresh) continue;
    throw Error(ErrorCode::corrupt, "the tensor is in " + holder->second + " and in " + file)
        .at_path(path)
        .at_key(leaf.name);
  }
  pairs.insert(pairs.end(), tree.pairs().begin(), tree.pairs().end());
}

// What is no tensor need not be in the index.
void leave_out_values(const std::vector<Leaf>& leaves, const safetensors::Index& index,
                      Holders& holders) {
  for (const Leaf& leaf : leaves) {
    if (!leaf.value.is(Value::Kind::tensor) && !index.files.contains(leaf.name))
      holders.erase(leaf.name);
  }
}

// `present`: what is beside the index.
Checkpoint open_set(const std::shared_ptr<Store>& store, const std::string& name,
                    const std::vector<ObjectInfo>& present, const OpenOptions& options) {
  const safetensors::Index index = read_set_index(*store, name);
  const FileByName named = files_in(index, present, *store);
  Checkpoint checkpoint;
  checkpoint.kind = CheckpointKind::torch_file;
  checkpoint.path = store->name();
  std::vector<Value::Pair> pairs;
  Holders holders;
  const auto open = std::make_shared<OpenFiles>();
  for (const auto& [file_name, file] : named) {
    const std::string path = store->name() + "/" + file_name;
    add_pairs(read_torch_tree(std::make_shared<LazySource>(store, file, open), path, options,
                              checkpoint.warnings),
              file_name, path, pairs, holders);
    checkpoint.files.push_back(file);
  }
  checkpoint.root = Value::dict(std::move(pairs));
  checkpoint.leaves = leaves_of(*checkpoint.root);
  checkpoint.has_types = true;
  checkpoint.store = store;
  leave_out_values(checkpoint.leaves, index, holders);
  check_against(index, std::move(holders), checkpoint);
  add_index(name, present, named, kTorchSet, checkpoint);
  require_coverage(checkpoint);
  return checkpoint;
}

}  // namespace

bool has_torch_set(const std::vector<ObjectInfo>& files) {
  return std::ranges::any_of(files, [](const ObjectInfo& file) {
    return file.name == kTorchSet.usual || (file.name.find('/') == std::string::npos &&
                                            file.name.ends_with(kTorchSet.index_suffix));
  });
}

Checkpoint open_torch_index(const std::shared_ptr<Store>& store, const std::string& index,
                            const OpenOptions& options) {
  return open_set(store, index, store->list_level(), options);
}

Checkpoint open_torch_directory(const std::shared_ptr<Store>& store,
                                const std::vector<ObjectInfo>& decided,
                                const OpenOptions& options) {
  std::vector<ObjectInfo> files = decided;
  std::erase_if(files,
                [](const ObjectInfo& file) { return file.name.find('/') != std::string::npos; });
  const std::string index = find_index(files, kTorchSet, *store);
  const std::string single = index.empty() ? std::string(kTorchSet.usual) : single_of(index);
  const auto lone = std::ranges::find(files, single, &ObjectInfo::name);
  if (lone == files.end()) return open_set(store, index, files, options);
  // As huggingface's loaders have it: the one file comes first where both are.
  Checkpoint checkpoint = open_torch(store, *lone, options);
  if (!index.empty()) {
    checkpoint.warnings.push_back(printable(index) + " is passed over for " + printable(single));
  }
  return checkpoint;
}

}  // namespace tessera
