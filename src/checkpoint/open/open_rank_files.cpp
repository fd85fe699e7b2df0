#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <thread>

#include "base/name_number.h"
#include "base/one_of.h"
#include "base/parallel.h"
#include "checkpoint/open/open.h"
#include "checkpoint/open/rank_files.h"
#include "format/sharded/sharded.h"
#include "format/torch/torch_file.h"
#include "tessera/error.h"
#include "value/children.h"

namespace tessera {
namespace {

using Kind = Value::Kind;

constexpr unsigned kMaxThreads = 8;
constexpr int kNamed = 16;  // files that an error names
constexpr std::string_view kWorldSize = "_world_size_";
constexpr std::string_view kRank = "_rank_";
constexpr std::string_view kSuffix = ".pt";
// The parts that FSDP trainers write into files of their own.
constexpr std::string_view kParts[] = {"model", "optim", "extra_state"};

// "PART_world_size_N_rank_", which a rank and ".pt" follow.
std::string world_size_prefix(std::string_view part, int world) {
  return std::string(part) + std::string(kWorldSize) + std::to_string(world) + std::string(kRank);
}

// N of "model_world_size_N_rank_{r}.pt".
std::optional<int> world_in(std::string_view name, std::string_view part) {
  const std::size_t end = name.find(kRank);
  if (end == std::string_view::npos) return std::nullopt;
  const auto world =
      number_between(std::string(part) + std::string(kWorldSize), name.substr(0, end), "");
  if (!world || !number_between(world_size_prefix(part, *world), name, kSuffix))
    return std::nullopt;
  return world;
}

std::optional<int> world_of(const std::vector<ObjectInfo>& files, std::string_view part,
                            const std::string& where) {
  std::optional<int> world;
  for (const ObjectInfo& file : files) {
    const auto found = world_in(file.name, part);
    if (!found) continue;
    if (*found < 1) {
      throw Error(ErrorCode::corrupt, "files of " + std::to_string(*found) + " ranks")
          .at_path(where);
    }
    if (world.value_or(*found) != *found) {
      throw Error(ErrorCode::conflict, "files of " + std::to_string(*world) + " and of " +
                                           std::to_string(*found) + " ranks")
          .at_path(where);
    }
    world = found;
  }
  return world;
}

bool has_model(const Value& tree) {
  return find_entry_of_kind(tree, "model", Kind::dict) != nullptr;
}

// {"model", "optim", **trainer state} of OLMo: what is the trainer's own goes below "train".
Value with_train_state(const Value& tree) {
  if (!has_model(tree)) return tree;
  Value arranged = Value::dict();
  Value train = Value::dict();
  for (const auto& [key, value] : tree.pairs()) {
    const bool own = !is_one_of(key, Value("model"), Value("optim"));
    (own ? train : arranged).set_item(key, value);
  }
  if (train.size() > 0) arranged.set_item(Value(std::string(kTrainState)), train);
  return arranged;
}

Value resolved(const RankStore& from, const ObjectInfo& file, const sharded::Rank& rank) {
  sharded::Rebuilder rebuild(rank);
  Value tree = read_rank_file(from, file, std::ref(rebuild));
  try {
    sharded::resolve(tree, rank);
  } catch (Error& error) {
    throw error.at_path(from.store->name() + "/" + file.name);
  }
  return tree;
}

Checkpoint rank_checkpoint(std::shared_ptr<Store> store, CheckpointKind kind, int world) {
  Checkpoint checkpoint;
  checkpoint.kind = kind;
  checkpoint.path = store->name();
  checkpoint.store = std::move(store);
  checkpoint.world_size = world;
  return checkpoint;
}

std::map<int, ObjectInfo> files_by_rank(const std::vector<ObjectInfo>& files,
                                        const std::string& prefix) {
  std::map<int, ObjectInfo> found;
  for (const ObjectInfo& file : files) {
    if (const auto rank = number_between(prefix, file.name, kSuffix)) found.emplace(*rank, file);
  }
  return found;
}

// The files of one part, in the order of ranks; none when there is no such part.
std::optional<std::vector<ObjectInfo>> files_of_part(const std::vector<ObjectInfo>& all,
                                                     const std::string& part, int world,
                                                     const std::string& where) {
  const auto of_part = world_of(all, part, where);
  if (!of_part) return std::nullopt;
  auto files = rank_files(all, world_size_prefix(part, *of_part), where);
  if (*of_part != world || std::ssize(files) != world) {
    throw Error(ErrorCode::incomplete, "there are " + std::to_string(files.size()) + " files of " +
                                           part + ", for " + std::to_string(world) + " ranks")
        .at_path(where);
  }
  return files;
}

Checkpoint merged_rank_files(const std::shared_ptr<Store>& store,
                             const std::vector<ObjectInfo>& all) {
  const auto files = rank_files(all, own_prefix(""), store->name());
  const int world = static_cast<int>(files.size());
  Checkpoint checkpoint = rank_checkpoint(store, CheckpointKind::rank_files, world);
  checkpoint.files = files;
  const RankStore from{store};
  merge_ranks(checkpoint, world, [&](int rank) {
    return with_train_state(resolved(from, files[static_cast<std::size_t>(rank)], {rank, world}));
  });
  if (has_model(*checkpoint.root)) checkpoint.kind = CheckpointKind::olmo_legacy;
  return checkpoint;
}

}  // namespace

std::vector<ObjectInfo> rank_files(const std::vector<ObjectInfo>& files, const std::string& prefix,
                                   const std::string& where) {
  std::vector<ObjectInfo> ordered;
  for (auto& [rank, file] : files_by_rank(files, prefix)) {
    if (rank != static_cast<int>(ordered.size())) {
      std::string what = "there is " + file.name + ", but not " + prefix;
      what += std::to_string(ordered.size()).append(kSuffix);
      throw Error(ErrorCode::incomplete, std::move(what)).at_path(where);
    }
    ordered.push_back(std::move(file));
  }
  return ordered;
}

void rethrow_with_missing(const Error& error, const std::vector<ObjectInfo>& files,
                          const std::string& prefix, int world) {
  if (error.code() != ErrorCode::incomplete) throw Error(error);
  const std::map<int, ObjectInfo> found = files_by_rank(files, prefix);
  std::string names;
  int missing = 0;
  for (int rank = 0; rank < world; ++rank) {
    if (found.contains(rank) || ++missing > kNamed) continue;
    names += (missing > 1 ? ", " : "") + prefix + std::to_string(rank) + ".pt";
  }
  if (missing == 0) throw Error(error);
  if (missing > kNamed) names += " and " + std::to_string(missing - kNamed) + " more";
  throw Error(error.code(), error.message() + "; of " + std::to_string(world) +
                                " ranks' files these are missing: " + names)
      .at_path(error.path());
}

std::string own_prefix(const std::string& folder) {
  return folder.empty() ? "rank" : folder + "/rank";
}

std::string own_file(const std::string& folder, int rank) {
  return own_prefix(folder) + std::to_string(rank).append(kSuffix);
}

std::optional<int> rank_of_own(std::string_view name, const std::string& folder) {
  return number_between(own_prefix(folder), name, kSuffix);
}

bool has_own_files(const std::vector<ObjectInfo>& files, const std::string& folder) {
  return std::ranges::any_of(files, [&folder](const ObjectInfo& file) {
    return rank_of_own(file.name, folder).has_value();
  });
}

int ranks_of_own(const std::vector<ObjectInfo>& files, const std::string& folder) {
  int ranks = 0;
  for (const ObjectInfo& file : files)
    ranks = std::max(ranks, rank_of_own(file.name, folder).value_or(-1) + 1);
  return ranks;
}

Value read_rank_file(const RankStore& from, const ObjectInfo& file, const Rebuild& rebuild) {
  torch_file::ReadOptions options;
  options.skip_shard_lists = true;
  options.rebuild = rebuild;
  return torch_file::read(std::make_shared<LazySource>(from.store, file, from.files), options);
}

void merge_ranks(Checkpoint& checkpoint, int world, const std::function<Value(int rank)>& tree_of) {
  RankMerge merge;
  merge.add(0, tree_of(0));
  const unsigned cores = std::max(1U, std::thread::hardware_concurrency());
  parallel_for(static_cast<int>(std::min(cores, kMaxThreads)), static_cast<std::size_t>(world - 1),
               [&](std::size_t i) {
                 const int rank = static_cast<int>(i) + 1;
                 merge.add(rank, tree_of(rank));
               });
  try {
    Merged merged = merge.finish();
    checkpoint.root = std::move(merged.tree);
    checkpoint.leaves = leaves_of(*checkpoint.root);
    checkpoint.replicas = std::move(merged.replicas);
    checkpoint.warnings.insert(checkpoint.warnings.end(), merged.warnings.begin(),
                               merged.warnings.end());
  } catch (Error& error) {
    throw error.at_path(checkpoint.path);
  }
  require_coverage(checkpoint);
}

bool has_rank_files(const std::vector<ObjectInfo>& files) {
  return has_own_files(files, "");
}

Checkpoint open_rank_files(const std::shared_ptr<Store>& store,
                           const std::vector<ObjectInfo>& files) {
  try {
    return merged_rank_files(store, files);
  } catch (const Error& error) {
    const std::map<int, ObjectInfo> found = files_by_rank(files, own_prefix(""));
    const Value tree = read_rank_file({store}, found.begin()->second);
    rethrow_with_missing(error, files, own_prefix(""), sharded::world_of(tree).value_or(0));
  }
}

std::optional<Value> read_legacy_part(const RankStore& from, const sharded::Rank& rank) {
  const std::string name = own_file("", rank.rank);
  sharded::Rebuilder rebuild(rank);
  Value tree = read_rank_file(from, {name, from.store->open(name)->size()}, std::ref(rebuild));
  const std::optional<int> world = sharded::world_of(tree);
  if (!has_model(tree) || (world ? world : rebuild.world()) != rank.world) return std::nullopt;
  try {
    sharded::resolve(tree, rank);
  } catch (Error& error) {
    throw error.at_path(from.store->name() + "/" + name);
  }
  Value part = Value::dict();
  for (const char* key : {"model", "optim"}) {
    if (const Value* found = tree.find(key)) part.set_item(key, *found);
  }
  return part;
}

bool is_world_size_file(std::string_view name) {
  return std::ranges::any_of(
      kParts, [name](std::string_view part) { return world_in(name, part).has_value(); });
}

bool has_world_size_files(const std::vector<ObjectInfo>& files) {
  return std::any_of(files.begin(), files.end(), [](const ObjectInfo& file) {
    return world_in(file.name, kParts[0]).has_value();
  });
}

Checkpoint open_world_size_files(const std::shared_ptr<Store>& store,
                                 const std::vector<ObjectInfo>& all) {
  const int world = *world_of(all, kParts[0], store->name());
  Checkpoint checkpoint = rank_checkpoint(store, CheckpointKind::rank_files, world);
  std::map<std::string, std::vector<ObjectInfo>> parts;
  for (const std::string_view part : kParts) {
    const std::string name(part);
    auto files = files_of_part(all, name, world, store->name());
    if (!files) continue;
    checkpoint.files.insert(checkpoint.files.end(), files->begin(), files->end());
    parts.emplace(part == "extra_state" ? std::string(kTrainState) : name, std::move(*files));
  }
  const RankStore from{store};
  merge_ranks(checkpoint, world, [&](int rank) {
    Value tree = Value::dict();
    for (const auto& [name, files] : parts) {
      tree.set_item(Value(name),
                    resolved(from, files[static_cast<std::size_t>(rank)], {rank, world}));
    }
    return tree;
  });
  return checkpoint;
}

}  // namespace tessera
