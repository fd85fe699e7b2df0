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
  std::size_t stretch = 0;
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
      ++stretch;
    }
    stored.stretch = stretch;
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

// Of storages that overlap all wait, or none.
std::vector<bool> TreeSnapshot::waiting(const std::function<bool(const Storage&)>& waits) const {
  const std::size_t last = stored_.empty() ? 0 : stored_.back().stretch;
  std::vector<bool> stretches(last + 1, static_cast<bool>(waits));
  for (const Stored& stored : stored_) {
    if (stretches[stored.stretch] && !waits(*stored.storage)) stretches[stored.stretch] = false;
  }
  return stretches;
}

void TreeSnapshot::lock_pages(Arena& arena) {
  const auto on_device = std::ranges::find_if(
      stored_, [](const Stored& stored) { return stored.storage->device != nullptr; });
  if (on_device != stored_.end()) is_locked_ = arena.lock_pages(*on_device->storage->device);
}

// `from`: the storages that have the bytes of the runs. A device copies into locked pages by
// itself, all runs at once.
template <typename StorageOf>
void TreeSnapshot::copy(int threads, const std::vector<Run>& runs, const StorageOf& from) {
  std::vector<std::unique_ptr<DeviceCopy>> copies;
  std::vector<Run> others;
  for (const Run& run : runs) {
    const Storage& storage = from(stored_[run.stored]);
    if (!is_locked_ || !storage.device) {
      others.push_back(run);
      continue;
    }
    const ReadRange range{run.from, memory_.subspan(run.place, run.size)};
    copies.push_back(storage.device->copy_out({&range, 1}));
  }
  parallel_for(threads, others.size(), [&](std::size_t i) {
    const Run& run = others[i];
    StorageReader(from(stored_[run.stored]), run.from, run.from + run.size)
        .read(run.from, memory_.subspan(run.place, run.size));
  });
  for (const auto& copy : copies) copy->wait();
}

Value TreeSnapshot::take(Arena& arena, int threads, const std::shared_ptr<Pace>& pace,
                         const std::function<bool(const Storage&)>& waits) {
  static constinit std::byte nothing{};  // the memory of storages without bytes
  memory_ = arena.room(bytes_);
  lock_pages(arena);
  const std::vector<bool> is_waiting = waiting(waits);
  std::vector<Run> now, rest;
  for (const Run& run : std::exchange(runs_, {}))
    (is_waiting[stored_[run.stored].stretch] ? rest : now).push_back(run);
  copy(threads, now, [](const Stored& one) -> const Storage& { return *one.storage; });
  for (Stored& stored : stored_) {
    Storage& storage = *stored.storage;
    if (is_waiting[stored.stretch]) {
      stored.original = storage;
      const auto beside = storage.device ? storage.device->beside() : nullptr;
      if (beside) stored.original.device = beside;
    }
    storage.device.reset();
    storage.source.reset();
    storage.owner.reset();
    storage.offset = 0;
    storage.data = nullptr;
    if (storage.size == 0) {
      storage.data = &nothing;
      continue;
    }
    std::byte* const at = memory_.data() + stored.place;
    if (pace) {
      storage.source =
          paced_source({at, static_cast<std::size_t>(storage.size)}, arena.owner(), pace);
    } else {
      storage.data = at;
      storage.owner = arena.owner();
    }
  }
  runs_ = std::move(rest);
  if (runs_.empty()) stored_.clear();
  return std::exchange(tree_, Value());
}

void TreeSnapshot::take_rest(int threads) {
  copy(threads, runs_, [](const Stored& one) -> const Storage& { return one.original; });
  runs_.clear();
  stored_.clear();
}

}  // namespace tessera
