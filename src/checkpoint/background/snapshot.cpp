#include "checkpoint/background/snapshot.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "base/numbers.h"
#include "base/parallel.h"
#include "checkpoint/read/memory.h"
#include "tessera/error.h"
#include "value/children.h"
#include "value/inner_tensors.h"
#include "value/storage_reader.h"

namespace tessera {
namespace {

// A place in the arena is one in a line of the processor's cache like that in the original: copies
// of aligned tensors are aligned.
constexpr std::uint64_t kLine = 64;
// Large enough that memcpy writes past the caches, and that threads have parts alike.
constexpr std::uint64_t kCopiedAtOnce = 32U << 20U;

std::uint64_t lines_of(std::uint64_t bytes) {
  return checked_add(bytes, kLine - 1) / kLine * kLine;
}

Value walkable_copy(const Value& tree) {
  require_walkable(tree);
  return copy_tree(tree);
}

}  // namespace

TreeSnapshot::TreeSnapshot(const Value& tree) : tree_(walkable_copy(tree)) {
  find_storages();
  place_storages();
}

void TreeSnapshot::find_storages() {
  if (tree_.is(Value::Kind::tensor)) add(tree_, "");
  for (const InnerTensor& inner : inner_tensors(tree_)) add(*inner.tensor, inner.path.substr(1));
  // A storage comes once for each piece that lies in it.
  std::ranges::sort(stored_, {}, [](const Stored& one) { return one.storage.get(); });
  const auto is_same = [](const Stored& a, const Stored& b) { return a.storage == b.storage; };
  stored_.erase(std::unique(stored_.begin(), stored_.end(), is_same), stored_.end());
}

void TreeSnapshot::add(const Value& tensor, const std::string& name) {
  require_readable(tensor.as_tensor(), name);
  for (const Piece& piece : tensor.as_tensor().pieces) {
    if (!piece.storage || piece.storage->encoding != Encoding::raw) continue;
    const Storage& storage = *piece.storage;
    Begin begin;
    if (storage.device) {
      begin = {storage.device->device(), nullptr, storage.device->address()};
    } else if (storage.data != nullptr) {
      begin.at = reinterpret_cast<std::uintptr_t>(storage.data);
    } else if (storage.source) {
      begin = {"", storage.source.get(), storage.offset};
    } else if (storage.size > 0) {
      continue;  // nowhere, which is right for pieces without elements alone
    }
    stored_.push_back({piece.storage, std::move(begin)});
  }
}

// Storages that overlap lie in the arena as they do in memory. How much is needed follows from
// their sizes alone: the same tree elsewhere in memory finds room in the same arena.
void TreeSnapshot::place_storages() {
  std::ranges::sort(stored_, {}, [](const Stored& one) {
    return std::tie(one.begin.device, one.begin.source, one.begin.at);
  });
  Begin first;                // where the present stretch of storages that overlap begins,
  std::uint64_t start = 0;    // in the arena, too, but for what its alignment takes,
  std::uint64_t covered = 0;  // and how many of its bytes are copied by those so far
  for (std::size_t i = 0; i < stored_.size(); ++i) {
    Stored& stored = stored_[i];
    const Begin& begin = stored.begin;
    const bool is_near = begin.device == first.device && begin.source == first.source &&
                         begin.at >= first.at && begin.at - first.at < covered;
    if (!is_near) {
      first = begin;
      start = bytes_;
      covered = 0;
    }
    const std::uint64_t within = begin.at - first.at;
    stored.place = start + first.at % kLine + within;
    const std::uint64_t end = checked_add(within, stored.storage->size);
    if (end <= covered) continue;
    add_runs(i, covered - within);
    covered = end;
    bytes_ = checked_add(start, lines_of(checked_add(covered, kLine)));
  }
}

void TreeSnapshot::add_runs(std::size_t stored, std::uint64_t from) {
  const Stored& one = stored_[stored];
  while (from < one.storage->size) {
    const auto size = std::min(kCopiedAtOnce, one.storage->size - from);
    runs_.push_back({stored, from, one.place + from, static_cast<std::size_t>(size)});
    from += size;
  }
}

Value TreeSnapshot::take(Arena& arena, int threads, const std::shared_ptr<Pace>& pace) {
  static constinit std::byte nothing{};  // the memory of storages without bytes
  const MutableByteView memory = arena.room(bytes_);
  parallel_for(threads, runs_.size(), [&](std::size_t i) {
    const Run& run = runs_[i];
    StorageReader(*stored_[run.stored].storage, run.from, run.from + run.size)
        .read(run.from, memory.subspan(run.place, run.size));
  });
  for (const Stored& stored : stored_) {
    Storage& storage = *stored.storage;
    storage.device.reset();
    storage.source.reset();
    storage.owner.reset();
    storage.offset = 0;
    storage.data = nullptr;
    if (storage.size == 0) {
      storage.data = &nothing;
      continue;
    }
    std::byte* const at = memory.data() + stored.place;
    if (pace) {
      storage.source =
          paced_source({at, static_cast<std::size_t>(storage.size)}, arena.owner(), pace);
    } else {
      storage.data = at;
      storage.owner = arena.owner();
    }
  }
  stored_.clear();
  return std::exchange(tree_, Value());
}

}  // namespace tessera
