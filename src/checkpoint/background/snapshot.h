// A tree whose tensors are copied into memory of somebody else's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/background/arena.h"
#include "tessera/io.h"
#include "tessera/value.h"

namespace tessera {

// The copy of a caller's tree, in two steps: how much memory it takes, and the copying. All bytes
// of each storage are copied, those that several storages share once; what shares a storage in the
// tree shares one in the copy. Encoded items stay where they are: they are of an open checkpoint.
class TreeSnapshot {
 public:
  // Throws `invalid_argument` for a tree that contains itself, and for a tensor that is not there,
  // with its key, as a save does.
  explicit TreeSnapshot(const Value& tree);

  [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }

  // Copies the tensors into the arena, which nobody else uses, on so many threads, and returns the
  // tree over these copies. `pace`: how fast they may be read; null: they are plain memory. What
  // lies in storages that `waits` says yes to, and in no other, is left for take_rest(); null: none
  // is. Throws what sources and devices of the tree throw. Call it once.
  [[nodiscard]] Value take(Arena& arena, int threads, const std::shared_ptr<Pace>& pace,
                           const std::function<bool(const Storage&)>& waits = {});
  // Whether take() has left something.
  [[nodiscard]] bool has_rest() const noexcept { return !runs_.empty(); }
  // Copies that. The storages of the original are kept alive until then. Once, from any thread.
  void take_rest(int threads);

 private:
  // Where the bytes of a storage begin: an address, or a place in a source.
  struct Begin {
    std::string device;  // empty: the host
    const void* source = nullptr;
    std::uint64_t at = 0;
  };
  struct Stored {
    std::shared_ptr<Storage> storage;  // of the copy, until take() still with the original's bytes
    Begin begin;
    std::uint64_t place = 0;  // in the arena
    std::size_t stretch = 0;  // of storages that overlap, by number
    Storage original = {};    // where the bytes are, for take_rest()
  };
  // Bytes of a storage that are copied together.
  struct Run {
    std::size_t stored = 0;
    std::uint64_t from = 0;   // in the storage
    std::uint64_t place = 0;  // in the arena
    std::size_t size = 0;
  };

  void find_storages();
  void add(const Value& tensor, const std::string& name);
  void place_storages();
  void add_runs(std::size_t stored, std::uint64_t from);
  [[nodiscard]] std::vector<bool> waiting(const std::function<bool(const Storage&)>& waits) const;
  template <typename StorageOf>
  void copy(int threads, const std::vector<Run>& runs, const StorageOf& from);
  void lock_pages(Arena& arena);

  Value tree_;
  std::vector<Stored> stored_;  // by place once they are placed
  std::vector<Run> runs_;
  std::uint64_t bytes_ = 0;
  MutableByteView memory_;  // of the arena, once take() has it
  bool is_locked_ = false;  // its pages are, for a device of the tree
};

}  // namespace tessera
