// A set of files of torch.save with an index, as huggingface wrote it before safetensors
// (docs/formats/torch-save.md).
#include <algorithm>

#include "checkpoint/open/indexed_set.h"
#include "checkpoint/open/open.h"
#include "storage/lazy_source.h"
#include "tessera/error.h"
#include "value/render.h"

namespace tessera {
namespace {

// Of one file. What is no tensor is at most in one of them, too.
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
