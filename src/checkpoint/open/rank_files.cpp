#include "checkpoint/open/rank_files.h"

#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <thread>

#include "base/parallel.h"
#include "base/text.h"
#include "checkpoint/open/open.h"
#include "checkpoint/read/missing.h"
#include "checkpoint/read/storage_checks.h"
#include "format/sharded/sharded.h"
#include "format/torch/torch_file.h"
#include "tessera/error.h"
#include "value/children.h"
#include "value/render.h"

namespace tessera {
namespace {

using Kind = Value::Kind;

bool is_train_state(const std::string& name) {
  return name.starts_with(std::string(kTrainState) + ".");
}

bool is_sharded(const Value& value) {
  return value.is(Kind::tensor) && value.as_tensor().sharded;
}

bool same(const Leaf& a, const Leaf& b) {
  const bool tensors = a.value.is(Kind::tensor) && b.value.is(Kind::tensor);
  return tensors ? same_elements(a.value.as_tensor(), b.value.as_tensor(), a.name)
                 : a.value == b.value;
}

std::string described(const Value& value) {
  if (!value.is(Kind::tensor)) return render(value, 60);
  const Tensor& tensor = value.as_tensor();
  return (tensor.sharded ? "parts of " : "") + std::string(to_string(tensor.dtype)) + " " +
         to_string(tensor.shape);
}

[[noreturn]] void refuse(ErrorCode code, int rank, const Leaf& leaf, const Leaf& known) {
  const std::string first = described(known.value), other = described(leaf.value);
  std::string what = "rank 0 has " + first + ", rank " + std::to_string(rank) + " has " + other;
  if (first == other) {
    what = "the values differ: " + what +
           " of other values; where ranks should hold the same, one of them went another way, and "
           "where each has its own, convert the file of each rank alone (--part) to keep all, or "
           "one of them with what is equal (--part --only)";
  }
  throw Error(code, what).at_key(leaf.name);
}

// The order of slices that puts equal ones side by side.
bool before(const Slice& a, const Slice& b) {
  if (a.index() != b.index()) return a.index() < b.index();
  if (const auto* range = std::get_if<FlatRange>(&a)) {
    const auto& other = std::get<FlatRange>(b);
    return std::pair(range->begin, range->end) < std::pair(other.begin, other.end);
  }
  const Box& box = std::get<Box>(a);
  const Box& other = std::get<Box>(b);
  return std::tie(box.offsets, box.sizes) < std::tie(other.offsets, other.sizes);
}

// The first of the pieces of one slice stays. Returns the others.
std::vector<Piece> take_replicas(std::vector<Piece>& pieces) {
  const auto slice_less = [](const Slice* a, const Slice* b) { return before(*a, *b); };
  std::set<const Slice*, decltype(slice_less)> seen(slice_less);
  std::vector<bool> keep;
  for (const Piece& piece : pieces) keep.push_back(seen.insert(&piece.slice).second);
  std::size_t at = 0;
  std::vector<Piece> kept;
  std::vector<Piece> others;
  for (Piece& piece : pieces) (keep[at++] ? kept : others).push_back(std::move(piece));
  pieces = std::move(kept);
  return others;
}

// Pieces stay by rank, without those that a lower rank has too, which are returned. A tensor
// without elements keeps an empty piece.
std::vector<Piece> put_in_order(Tensor& tensor) {
  auto& pieces = tensor.pieces;
  if (pieces.empty() && numel(tensor.shape) == 0) {
    pieces.push_back(empty_piece(tensor));
    return {};
  }
  std::ranges::stable_sort(pieces, {}, &Piece::rank);
  return take_replicas(pieces);
}

// The tensor with these pieces of it.
Leaf with_pieces(const Leaf& leaf, std::vector<Piece> pieces) {
  Tensor tensor = leaf.value.as_tensor();
  tensor.pieces = std::move(pieces);
  return Leaf{leaf.name, leaf.path, Value(std::move(tensor))};
}

void warn_of_differences(const std::vector<std::string>& names,
                         std::vector<std::string>& warnings) {
  if (names.empty()) return;
  std::string text = "rank 0's values are kept where ranks differ: " + names[0];
  if (names.size() > 1) text += " and " + std::to_string(names.size() - 1) + " more";
  warnings.push_back(std::move(text));
}

}  // namespace

void RankMerge::add(int rank, Value tree) {
  std::vector<Leaf> leaves = flatten(tree);
  const std::lock_guard lock(mutex_);
  if (rank == 0) return begin(std::move(tree), std::move(leaves));
  for (Leaf& leaf : leaves) {
    const auto known = leaves_.find(leaf.name);
    if (known == leaves_.end()) {
      late_.push_back({rank, std::move(leaf)});
    } else {
      merge(rank, leaf, known->second);
    }
  }
}

void RankMerge::begin(Value tree, std::vector<Leaf> leaves) {
  tree_ = std::move(tree);
  for (Leaf& leaf : leaves) leaves_.emplace(leaf.name, std::move(leaf));
}

void RankMerge::merge(int rank, const Leaf& leaf, const Leaf& known) {
  if (is_sharded(leaf.value) || is_sharded(known.value)) return add_pieces(rank, leaf, known);
  if (unlike_ == Unlike::first_rank) return;
  if (same(known, leaf)) return;
  if (!is_train_state(leaf.name)) refuse(ErrorCode::mismatch, rank, leaf, known);
  differ_.push_back(leaf.name);
}

void RankMerge::add_pieces(int rank, const Leaf& leaf, const Leaf& known) {
  if (!is_sharded(leaf.value) || !is_sharded(known.value) ||
      !same_form(leaf.value.as_tensor(), known.value.as_tensor())) {
    refuse(ErrorCode::corrupt, rank, leaf, known);
  }
  const Tensor& more = leaf.value.as_tensor();
  Value handle = known.value;
  Tensor& tensor = handle.as_tensor();
  tensor.pieces.insert(tensor.pieces.end(), more.pieces.begin(), more.pieces.end());
}

std::optional<Value> RankMerge::place_of(const Path& path) {
  Value at = tree_;
  for (std::size_t i = 0; i + 1 < path.size(); ++i) {
    const std::optional<Value> key = key_of_step(path[i]);
    if (!key || !at.is(Kind::dict)) return std::nullopt;
    if (at.find_key(*key) == nullptr) at.set_item(*key, Value::dict());
    at = Value(*at.find_key(*key));
  }
  return at.is(Kind::dict) ? std::optional(at) : std::nullopt;
}

void RankMerge::insert(int rank, const Leaf& leaf) {
  std::optional<Value> at = place_of(leaf.path);
  const std::optional<Value> key = leaf.path.empty() ? std::nullopt : key_of_step(leaf.path.back());
  if (!key || !at) {
    throw Error(ErrorCode::mismatch, "rank " + std::to_string(rank) + " has it, rank 0 does not")
        .at_key(leaf.name);
  }
  at->set_item(*key, leaf.value);
  leaves_.emplace(leaf.name, leaf);
}

void RankMerge::add_late() {
  std::ranges::stable_sort(late_, {}, &Late::rank);
  for (const Late& late : late_) {
    if (unlike_ == Unlike::refused && is_train_state(late.leaf.name)) {
      differ_.push_back(late.leaf.name);
      continue;
    }
    const auto known = leaves_.find(late.leaf.name);
    if (known == leaves_.end()) {
      insert(late.rank, late.leaf);
    } else {
      merge(late.rank, late.leaf, known->second);
    }
  }
}

Merged RankMerge::finish() {
  const std::lock_guard lock(mutex_);
  add_late();
  Merged merged;
  for (auto& [name, leaf] : leaves_) {
    if (!is_sharded(leaf.value)) continue;
    std::vector<Piece> others = put_in_order(leaf.value.as_tensor());
    if (!others.empty()) merged.replicas.push_back(with_pieces(leaf, std::move(others)));
  }
  std::sort(differ_.begin(), differ_.end());
  differ_.erase(std::unique(differ_.begin(), differ_.end()), differ_.end());
  warn_of_differences(differ_, merged.warnings);
  merged.tree = std::move(tree_);
  return merged;
}

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
    return with_train_state(
        resolved_rank_file(from, files[static_cast<std::size_t>(rank)], {rank, world}));
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

Value resolved_rank_file(const RankStore& from, const ObjectInfo& file, const sharded::Rank& rank) {
  sharded::Rebuilder rebuild(rank);
  Value tree = read_rank_file(from, file, std::ref(rebuild));
  try {
    sharded::resolve(tree, rank);
  } catch (Error& error) {
    throw error.at_path(from.store->name() + "/" + file.name);
  }
  return tree;
}

void merge_ranks(Checkpoint& checkpoint, int world, const std::function<Value(int rank)>& tree_of,
                 Unlike unlike) {
  RankMerge merge(unlike);
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
                    resolved_rank_file(from, files[static_cast<std::size_t>(rank)], {rank, world}));
    }
    return tree;
  });
  return checkpoint;
}

}  // namespace tessera
