// The memory that saves in the background are written from.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

#include "base/process.h"
#include "tessera/io.h"

namespace tessera {

// Memory of the system, made once and touched, for the snapshot of one save after another. Children
// of fork() do not have it: what is copied into it while one lives would be copied once more, page
// by page. One thread uses the members.
class Arena {
 public:
  // `bytes`: its size for good, and it is made now; 0: that of the largest snapshot so far.
  // `shared`: memory that another process can have by fd().
  Arena(std::uint64_t bytes, int threads, bool shared = false);

  // Room for a snapshot of so many bytes, from the beginning on: what was there is lost. But if
  // another process reads that, it is other memory, and the reader's goes when that has read.
  // Throws `limit` if it is too small for good, and `io` if the system has no memory.
  MutableByteView room(std::uint64_t bytes);
  // Keeps the memory alive that room() has given.
  [[nodiscard]] const std::shared_ptr<std::byte>& owner() const noexcept { return memory_; }
  // Has a device page-lock the memory, unless one has. Returns whether it is.
  bool lock_pages(DeviceMemory& device);
  [[nodiscard]] ByteView memory() const noexcept {
    return {memory_.get(), static_cast<std::size_t>(size_)};
  }
  // Bytes of the last snapshot.
  [[nodiscard]] std::uint64_t used() const noexcept { return used_; }
  // Of the memory, where it is shared.
  [[nodiscard]] const Fd& fd() const noexcept { return fd_; }
  // How often snapshots were begun in this memory (storage/arena/arenas.h); 0 where it is not
  // shared.
  [[nodiscard]] std::uint64_t overwrites() const;
  // How often memory was made, the present one the last.
  [[nodiscard]] std::uint64_t generation() const noexcept { return generation_; }

 private:
  void make(std::uint64_t bytes);
  void make_unread();
  [[nodiscard]] std::uint64_t mapped_size(std::uint64_t bytes) const;

  [[nodiscard]] std::byte* map(std::uint64_t bytes);

  const std::uint64_t fixed_;  // the size for good; 0: there is none
  const bool is_shared_;
  const int threads_;  // that touch it
  Fd fd_;
  std::uint64_t generation_ = 0;
  std::uint64_t size_ = 0;
  std::uint64_t used_ = 0;
  std::shared_ptr<std::byte> memory_;  // null: none was made
  bool is_lock_asked_for_ = false;     // of this memory
  std::shared_ptr<void> lock_;         // goes before the memory; null: its pages are not locked
};

// How many bytes a second may pass.
class Pace {
 public:
  explicit Pace(std::uint64_t rate) : rate_(rate) {}  // bytes a second, not 0
  // Returns when so many bytes more may pass. From any thread. Throws `cancelled` once the job of
  // the thread is to end (HeedStop).
  void pass(std::uint64_t bytes);

 private:
  const std::uint64_t rate_;
  std::mutex mutex_;
  std::chrono::steady_clock::time_point next_{};  // guarded by mutex_: when what comes may pass
};

// Bytes of an arena, read at a pace. `owner` keeps them alive.
[[nodiscard]] std::shared_ptr<ByteSource> paced_source(ByteView bytes,
                                                       std::shared_ptr<std::byte> owner,
                                                       std::shared_ptr<Pace> pace);

}  // namespace tessera
