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
#include "base/text.h"
#include "checkpoint/open/arena_tree.h"
#include "checkpoint/open/open.h"
#include "checkpoint/open/rank_files.h"
#include "checkpoint/read/guard.h"
#include "checkpoint/read/side_file.h"
#include "comm/message.h"
#include "io/source.h"
#include "storage/arena/arenas.h"
#include "storage/storage.h"
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

// One rank's objects.
struct ArenaRank {
  ArenaTreeHead head;
  Bytes message;  // of its tree
};

// What a message cannot be is `corrupt`, whichever part of it says so.
template <typename Work>
auto decoded(const ByteSource& source, const Work& work) {
  try {
    return work();
  } catch (Error& error) {
    throw Error(ErrorCode::corrupt, error.message()).at_path(source.name());
  } catch (const std::exception& error) {
    throw Error(ErrorCode::corrupt, std::string("no tree of a snapshot: ") + error.what())
        .at_path(source.name());
  }
}

ArenaRank rank_in(const Store& store, int rank, std::uint64_t digest) {
  const auto source = store.open(arena_names(rank).tree);
  const Bytes bytes = read_all(*source, kMostTree);
  if (digest64(bytes) != digest)
    throw Error(ErrorCode::corrupt, "the digest differs").at_path(source->name());
  return decoded(*source, [&] {
    ByteView rest = bytes;
    ArenaRank found{.head = take_head(rest), .message = {}};
    found.message.assign(rest.begin(), rest.end());
    return found;
  });
}

// Throws `conflict` and `incomplete` for what is not rank `rank` of the save that rank 0 is of.
void require_part(const ArenaTreeHead& head, const ArenaTreeHead& first, int rank, int found,
                  const std::string& path) {
  if (head.size != found) {
    throw Error(ErrorCode::incomplete, "a snapshot of " + std::to_string(head.size) +
                                           " ranks, of which " + std::to_string(found) +
                                           " are here")
        .at_path(path);
  }
  if (head.rank != rank || head.writer != first.writer || head.number != first.number)
    throw Error(ErrorCode::conflict, "parts of two saves").at_path(path);
}

Value tree_in(const std::shared_ptr<Store>& store, int rank, const Bytes& message,
              const std::shared_ptr<OpenFiles>& files) {
  const ArenaNames names = arena_names(rank);
  const auto arena = std::make_shared<LazySource>(
      store, ObjectInfo{names.arena, store->open(names.arena)->size()}, files);
  const auto place = [&arena](Storage& storage, std::uint64_t begin) {
    storage.source = arena;
    storage.offset = begin;
  };
  return decoded(*store->open(names.tree),
                 [&] { return tree_from_message(message, arena->size(), place); });
}

}  // namespace

bool has_arena_files(const std::vector<ObjectInfo>& files) {
  const ArenaNames first = arena_names(0);
  return has_object(files, first.tree) && has_object(files, first.arena) &&
         has_object(files, first.digests);
}

Checkpoint open_arena(const std::shared_ptr<Store>& store, const std::vector<ObjectInfo>& files) {
  const auto has_arena = [](const ObjectInfo& file) {
    return number_between("rank", file.name, ".arena").has_value();
  };
  const auto world = static_cast<int>(std::ranges::count_if(files, has_arena));
  const auto digests = std::make_shared<DigestsByName>();
  std::vector<ArenaRank> ranks;
  for (int rank = 0; rank < world; ++rank) {
    const ArenaNames names = arena_names(rank);
    const auto arena = std::ranges::find(files, names.arena, &ObjectInfo::name);
    if (arena == files.end()) {
      throw Error(ErrorCode::incomplete, "there is no " + names.arena + " of a snapshot")
          .at_path(store->name());
    }
    Digests of_rank = digests_in(*store, names.digests);
    ranks.push_back(rank_in(*store, rank, of_rank.front()));
    require_part(ranks.back().head, ranks.front().head, rank, world,
                 store->name() + "/" + names.tree);
    of_rank.erase(of_rank.begin());
    (*digests)[names.arena] = {.size = arena->size, .blocks = std::move(of_rank)};
  }
  Checkpoint checkpoint;
  checkpoint.kind = CheckpointKind::arena;
  checkpoint.path = store->name();
  checkpoint.store = guarded_store(store, digests);
  checkpoint.world_size = world;
  checkpoint.files = files;
  const auto open = std::make_shared<OpenFiles>();
  const auto tree_of = [&](int rank) {
    return tree_in(checkpoint.store, rank, ranks.at(static_cast<std::size_t>(rank)).message, open);
  };
  merge_ranks(checkpoint, world, tree_of, Unlike::first_rank);
  return checkpoint;
}

}  // namespace tessera
