// rank{r}.tree, rank{r}.arena, rank{r}.digests: the snapshot of a save that writer processes keep
// (docs/design/arena.md), for each rank its tree, its memory, and the digests of that memory's
// blocks.
#include <algorithm>
#include <cstring>
#include <exception>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/digest.h"
#include "checkpoint/open/arena_tree.h"
#include "checkpoint/open/open.h"
#include "checkpoint/open/rank_files.h"
#include "checkpoint/read/guard.h"
#include "checkpoint/read/side_file.h"
#include "comm/message.h"
#include "io/source.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr std::uint64_t kMostTree = std::uint64_t{1} << 32;  // bytes

// The digest of the tree, and those of the memory's blocks.
Digests digests_in(const Store& store, const std::string& name) {
  const auto source = store.open(name);
  const Bytes bytes = read_all(*source, kMostTree);
  Digests digests(bytes.size() / sizeof(std::uint64_t));
  if (digests.empty() || bytes.size() % sizeof(std::uint64_t) != 0)
    throw Error(ErrorCode::corrupt, "no digests of a snapshot").at_path(source->name());
  std::memcpy(digests.data(), bytes.data(), bytes.size());
  return digests;
}

// What a message cannot be is `corrupt`, whichever part of it says so.
Value tree_in(const std::shared_ptr<Store>& store, const ArenaNames& names, std::uint64_t digest,
              const std::shared_ptr<OpenFiles>& files) {
  const auto source = store->open(names.tree);
  const Bytes message = read_all(*source, kMostTree);
  if (digest64(message) != digest)
    throw Error(ErrorCode::corrupt, "the digest differs").at_path(source->name());
  const auto arena = std::make_shared<LazySource>(
      store, ObjectInfo{names.arena, store->open(names.arena)->size()}, files);
  const auto place = [&arena](Storage& storage, std::uint64_t begin) {
    storage.source = arena;
    storage.offset = begin;
  };
  try {
    return tree_from_message(message, arena->size(), place);
  } catch (Error& error) {
    throw error.at_path(source->name());
  } catch (const std::exception& error) {
    throw Error(ErrorCode::corrupt, std::string("no tree of a snapshot: ") + error.what())
        .at_path(source->name());
  }
}

}  // namespace

ArenaNames arena_names(int rank) {
  const std::string start = "rank" + std::to_string(rank);
  return {start + ".tree", start + ".arena", start + ".digests"};
}

bool has_arena_files(const std::vector<ObjectInfo>& files) {
  const ArenaNames first = arena_names(0);
  const auto has = [&files](const std::string& name) {
    return std::ranges::find(files, name, &ObjectInfo::name) != files.end();
  };
  return has(first.tree) && has(first.arena) && has(first.digests);
}

Checkpoint open_arena(const std::shared_ptr<Store>& store, const std::vector<ObjectInfo>& files) {
  const auto digests = std::make_shared<DigestsByName>();
  std::vector<std::uint64_t> of_trees;
  for (int rank = 0;; ++rank) {
    const ArenaNames names = arena_names(rank);
    const auto arena = std::ranges::find(files, names.arena, &ObjectInfo::name);
    if (arena == files.end()) break;
    Digests of_rank = digests_in(*store, names.digests);
    of_trees.push_back(of_rank.front());
    of_rank.erase(of_rank.begin());
    (*digests)[names.arena] = {.size = arena->size, .blocks = std::move(of_rank)};
  }
  const int world = static_cast<int>(of_trees.size());
  Checkpoint checkpoint;
  checkpoint.kind = CheckpointKind::arena;
  checkpoint.path = store->name();
  checkpoint.store = guarded_store(store, digests);
  checkpoint.world_size = world;
  checkpoint.files = files;
  const auto open = std::make_shared<OpenFiles>();
  const auto tree_of = [&](int rank) {
    return tree_in(checkpoint.store, arena_names(rank), of_trees.at(static_cast<std::size_t>(rank)),
                   open);
  };
  merge_ranks(checkpoint, world, tree_of, Unlike::first_rank);
  return checkpoint;
}

}  // namespace tessera
