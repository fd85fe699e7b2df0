#include "checkpoint/open/dcp_parts.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <set>
#include <utility>

#include "base/text.h"
#include "checkpoint/dcp/read_catalog.h"
#include "checkpoint/open/open.h"
#include "format/olmo/yaml.h"
#include "storage/forwarding_store.h"
#include "storage/lazy_source.h"
#include "storage/storage.h"
#include "tessera/error.h"
#include "value/children.h"
#include "value/render.h"

namespace tessera {

Checkpoint open_dcp_below(const std::shared_ptr<Store>& store, const std::string& folder,
                          const OpenOptions& options) {
  Checkpoint checkpoint = open_dcp(std::make_shared<SubStore>(store, folder), options);
  checkpoint.path = store->name();
  for (ObjectInfo& file : checkpoint.files) file.name.insert(0, folder + "/");
  for (FileRow& row : checkpoint.remarks) row.name.insert(0, folder + "/");
  for (std::string& warning : checkpoint.warnings) warning.insert(0, folder + ": ");
  checkpoint.store = store;
  return checkpoint;
}

namespace {

constexpr std::string_view kModelPart = "pytorch_model_fsdp_";
constexpr std::string_view kOptimizerPart = "optimizer_";

std::optional<int> number_of_part(std::string_view folder) {
  const auto model = number_between(kModelPart, folder, "");
  return model ? model : number_between(kOptimizerPart, folder, "");
}

// The folders of the one pair that the directory has; empty: it is not there.
struct Parts {
  std::string model, optimizer;
};

// By the directories: one in which nothing is yet tells of a save that never finished.
Parts parts_in(const Store& store) {
  Parts parts;
  std::set<int> numbers;
  for (const std::string& folder : store.list_directories()) {
    const auto number = number_of_part(folder);
    if (!number) continue;
    numbers.insert(*number);
    (folder.starts_with(kModelPart) ? parts.model : parts.optimizer) = folder;
  }
  if (numbers.size() <= 1) return parts;
  throw Error(ErrorCode::unsupported,
              "the directory has the checkpoints of " + std::to_string(numbers.size()) +
                  " models, whose names may be the same: open each of them by its own directory, "
                  "such as " +
                  (parts.model.empty() ? parts.optimizer : parts.model))
      .at_path(store.name());
}

Checkpoint open_part(const std::shared_ptr<Store>& store, const std::string& folder,
                     const OpenOptions& options) {
  if (store->exists(folder + "/" + std::string(kDcpMetadata)))
    return open_dcp_below(store, folder, options);
  throw Error(ErrorCode::incomplete, folder + " has no .metadata: its save never finished")
      .at_path(store->name() + "/" + folder);
}

template <typename T>
void append(std::vector<T>& from, std::vector<T>& to) {
  std::ranges::move(from, std::back_inserter(to));
}

// Each name may be there once. Leaves of a tree that one name lies inside of another are found when
// the tree is made.
void add_leaves(std::vector<Leaf> leaves, Checkpoint& checkpoint) {
  std::set<std::string_view> names;
  for (const Leaf& leaf : checkpoint.leaves) names.insert(leaf.name);
  for (const Leaf& leaf : leaves) {
    if (!names.contains(leaf.name)) continue;
    throw Error(ErrorCode::conflict, "two parts of the checkpoint have this name")
        .at_path(checkpoint.path)
        .at_key(printable(leaf.name));
  }
  append(leaves, checkpoint.leaves);
}

}  // namespace

bool is_part_folder(std::string_view name) {
  return number_of_part(name).has_value();
}

bool is_part_metadata(std::string_view name) {
  const std::size_t slash = name.find('/');
  return slash != std::string_view::npos && name.substr(slash + 1) == kDcpMetadata &&
         is_part_folder(name.substr(0, slash));
}

bool has_parts(const std::vector<ObjectInfo>& files) {
  return std::ranges::any_of(files, [](const ObjectInfo& file) {
    const std::string_view name = file.name;
    return is_part_metadata(name) ||
           (name.ends_with(".distcp") && is_part_folder(name.substr(0, name.find('/'))));
  });
}

Checkpoint open_parts(const std::shared_ptr<Store>& store, const OpenOptions& options) {
  const Parts parts = parts_in(*store);
  if (parts.model.empty()) {
    throw Error(ErrorCode::incomplete,
                parts.optimizer + " is here, and not the model's directory " +
                    std::string(kModelPart) + parts.optimizer.substr(kOptimizerPart.size()))
        .at_path(store->name());
  }
  Checkpoint checkpoint = open_part(store, parts.model, options);
  if (parts.optimizer.empty()) {
    checkpoint.warnings.push_back("beside " + parts.model +
                                  " is no optimizer: these are the weights alone");
    return checkpoint;
  }
  Checkpoint optimizer = open_part(store, parts.optimizer, options);
  add_leaves(std::move(optimizer.leaves), checkpoint);
  append(optimizer.files, checkpoint.files);
  append(optimizer.remarks, checkpoint.remarks);
  append(optimizer.warnings, checkpoint.warnings);
  checkpoint.world_size = std::max(checkpoint.world_size, optimizer.world_size);
  checkpoint.has_types = checkpoint.has_types && optimizer.has_types;
  checkpoint.save_id.clear();  // each part has its own
  return checkpoint;
}

namespace {

// Megatron-Core's: what is the same on all ranks, and by which formats it was saved.
constexpr std::string_view kCommonFile = "common.pt";
constexpr std::string_view kBackendsFile = "metadata.json";
constexpr std::uint64_t kBackendsLimit = 1 << 20;  // bytes; Megatron writes some hundred
constexpr const char* kBackend = "sharded_backend";
// Lightning's: all of the state that is no model and no optimizer.
constexpr std::string_view kMetaFile = "meta.pt";

ObjectInfo object_of(const Checkpoint& checkpoint, std::string_view name) {
  return {std::string(name), checkpoint.store->open(name)->size()};
}

Value read_beside(const ObjectInfo& file, const OpenOptions& options, Checkpoint& checkpoint) {
  return read_torch_tree(std::make_shared<LazySource>(checkpoint.store, file),
                         checkpoint.path + "/" + file.name, options, checkpoint.warnings);
}

// JSON is YAML, whose reader refuses keys that are there twice and text that is deep.
Value read_backends(const Checkpoint& checkpoint) {
  const auto source = checkpoint.store->open(kBackendsFile);
  try {
    return olmo::parse_yaml(read_all(*source, kBackendsLimit));
  } catch (Error& error) {
    throw error.at_path(source->name());
  }
}

// "sharded_backend: torch_dist, common_backend: torch"
std::string text_of_backends(const Value& backends) {
  Named named;
  for (const auto& [key, value] : backends.pairs()) {
    named.add(
        printable(key_text(key), 60) + ": " +
        (value.is(Value::Kind::string) ? printable(value.as_string(), 60) : render(value, 60)));
  }
  return named.text();
}

void add_megatron(const OpenOptions& options, Checkpoint& checkpoint) {
  const Value backends = read_backends(checkpoint);
  if (find_entry(backends, kBackend) == nullptr) return;  // somebody else's
  const ObjectInfo common = object_of(checkpoint, kCommonFile);
  const ObjectInfo config = object_of(checkpoint, kBackendsFile);
  add_leaves(leaves_of(Value::dict({{"common", read_beside(common, options, checkpoint)}})),
             checkpoint);
  checkpoint.files.push_back(common);
  checkpoint.files.push_back(config);
  checkpoint.remarks.push_back(
      {config.name, FileState::used, text_of_backends(backends), config.size});
}

void add_lightning(const OpenOptions& options, Checkpoint& checkpoint) {
  const ObjectInfo meta = object_of(checkpoint, kMetaFile);
  const Value tree = read_beside(meta, options, checkpoint);
  if (!tree.is(Value::Kind::dict)) {
    throw Error(ErrorCode::unsupported, "the file beside .metadata holds no dict, but " +
                                            std::string(describe(tree.kind())))
        .at_path(checkpoint.path + "/" + meta.name);
  }
  add_leaves(leaves_of(tree), checkpoint);
  checkpoint.files.push_back(meta);
}

// Those of the files that are there, by `has`.
template <typename Has>
std::vector<std::string_view> names_that(const Has& has) {
  std::vector<std::string_view> names;
  if (has(kCommonFile) && has(kBackendsFile)) names = {kCommonFile, kBackendsFile};
  if (has(kMetaFile)) names.push_back(kMetaFile);
  return names;
}

std::vector<std::string_view> names_in(const Store& store) {
  return names_that([&store](std::string_view name) { return store.exists(name); });
}

bool has_name_of_ours(const Catalog& catalog) {
  for (std::size_t i = 0; i < catalog.files(); ++i) {
    if (is_attempt_name(catalog.file(i).info.name)) return true;
  }
  return false;
}

// Whether a DCP checkpoint of these files may have others of another trainer's beside them.
bool may_have_others(const std::vector<ObjectInfo>& files) {
  return has_object(files, kDcpMetadata) &&
         std::ranges::none_of(files, is_attempt_name, &ObjectInfo::name);
}

}  // namespace

std::vector<std::string_view> names_beside(const std::vector<ObjectInfo>& files) {
  if (!may_have_others(files)) return {};
  return names_that([&files](std::string_view name) { return has_object(files, name); });
}

bool has_beside(const Store& store, const Catalog& catalog) {
  return !has_name_of_ours(catalog) && !names_in(store).empty();
}

void add_beside(const OpenOptions& options, Checkpoint& checkpoint) {
  if (!may_have_others(checkpoint.files)) return;
  const auto names = names_in(*checkpoint.store);
  if (std::ranges::find(names, kCommonFile) != names.end()) add_megatron(options, checkpoint);
  if (std::ranges::find(names, kMetaFile) != names.end()) add_lightning(options, checkpoint);
}

}  // namespace tessera
