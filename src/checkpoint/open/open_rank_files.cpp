#include <algorithm>
#include <charconv>
#include <functional>
#include <map>
#include <optional>
#include <thread>

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

constexpr int kMaxRanks = 1 << 20;
constexpr unsigned kMaxThreads = 8;
constexpr int kNamed = 16;  // files that an error names
constexpr std::string_view kWorldSize = "_world_size_";
// The parts that FSDP trainers write into files of their own.
constexpr std::string_view kParts[] = {"model", "optim", "extra_state"};

// A number as programs write it: no sign, no zeros in front.
std::optional<int> number_of(std::string_view text) {
  int number = 0;
  (void)std::from_chars(text.data(), text.data() + text.size(), number);
  // What is no such number, or not all of the text, makes another text.
  const bool plain = number >= 0 && number < kMaxRanks && std::to_string(number) == text;
  return plain ? std::optional(number) : std::nullopt;
}

// What stands between `prefix` and `suffix` in `name`; empty when it does not have both.
std::string_view between(std::string_view prefix, std::string_view name, std::string_view suffix) {
  if (name.size() <= prefix.size() + suffix.size() || !name.starts_with(prefix) ||
      !name.ends_with(suffix)) {
    return {};
  }
  name.remove_prefix(prefix.size());
  name.remove_suffix(suffix.size());
  return name;
}

// What stands between `prefix` and `suffix` in `name`, when it is a number.
std::optional<int> rank_in(std::string_view name, std::string_view prefix,
                           std::string_view suffix) {
  return number_of(between(prefix, name, suffix));
}

// N of "model_world_size_N_rank_{r}.pt".
std::optional<int> world_in(std::string_view name, std::string_view part) {
  const std::string prefix = std::string(part) + std::string(kWorldSize);
  const std::string_view numbers = between(prefix, name, ".pt");
  const std::size_t rank = numbers.find("_rank_");
  return rank == std::string_view::npos ? std::nullopt : number_of(numbers.substr(0, rank));
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
                                        const std::string& prefix, const std::string& suffix) {
  std::map<int, ObjectInfo> found;
  for (const ObjectInfo& file : files) {
    if (const auto rank = rank_in(file.name, prefix, suffix)) found.emplace(*rank, file);
  }
  return found;
}

// The files of one part, in the order of ranks; none when there is no such part.
std::optional<std::vector<ObjectInfo>> files_of_part(const std::vector<ObjectInfo>& all,
                                                     const std::string& part, int world,
                                                     const std::string& where) {
  const auto of_part = world_of(all, part, where);
  if (!of_part) return std::nullopt;
  const std::string prefix = part + std::string(kWorldSize) + std::to_string(*of_part) + "_rank_";
  auto files = rank_files(all, prefix, ".pt", where);
  if (*of_part != world || std::ssize(files) != world) {
    throw Error(ErrorCode::incomplete, "there are " + std::to_string(files.size()) + " files of " +
                                           part + ", for " + std::to_string(world) + " ranks")
        .at_path(where);
  }
  return files;
}

Checkpoint open_rank_files(const std::shared_ptr<Store>& store,
                           const std::vector<ObjectInfo>& all) {
  const auto files = rank_files(all, "rank", ".pt", store->name());
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
                                   const std::string& suffix, const std::string& where) {
  std::vector<ObjectInfo> ordered;
  for (auto& [rank, file] : files_by_rank(files, prefix, suffix)) {
    if (rank != static_cast<int>(ordered.size())) {
      std::string what = "there is " + file.name + ", but not " + prefix;
      what += std::to_string(ordered.size()) + suffix;
      throw Error(ErrorCode::incomplete, std::move(what)).at_path(where);
    }
    ordered.push_back(std::move(file));
  }
  return ordered;
}

void rethrow_with_missing(const Error& error, const std::vector<ObjectInfo>& files,
                          const std::string& prefix, int world) {
  if (error.code() != ErrorCode::incomplete) throw Error(error);
  const std::map<int, ObjectInfo> found = files_by_rank(files, prefix, ".pt");
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

std::string own_file(const std::string& folder, int rank) {
  return (folder.empty() ? "rank" : folder + "/rank") + std::to_string(rank) + ".pt";
}

std::optional<int> rank_between(std::string_view name, std::string_view prefix, char end) {
  const std::size_t at = name.find(end, std::min(prefix.size(), name.size()));
  if (at == std::string_view::npos) return std::nullopt;
  return rank_in(name, prefix, name.substr(at));
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
  return std::any_of(files.begin(), files.end(), [](const ObjectInfo& file) {
    return rank_in(file.name, "rank", ".pt").has_value();
  });
}

Checkpoint open_rank_files(const std::shared_ptr<Store>& store) {
  const std::vector<ObjectInfo> all = store->list();
  try {
    return open_rank_files(store, all);
  } catch (const Error& error) {
    const std::map<int, ObjectInfo> found = files_by_rank(all, "rank", ".pt");
    const Value tree = read_rank_file({store}, found.begin()->second);
    rethrow_with_missing(error, all, "rank", sharded::world_of(tree).value_or(0));
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

bool has_world_size_files(const std::vector<ObjectInfo>& files) {
  return std::any_of(files.begin(), files.end(), [](const ObjectInfo& file) {
    return world_in(file.name, kParts[0]).has_value();
  });
}

Checkpoint open_world_size_files(const std::shared_ptr<Store>& store) {
  const std::vector<ObjectInfo> all = store->list();
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
