// Blocks of files that several threads want parts of: one of them reads, and all of them take.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <future>
#include <list>
#include <memory>
#include <optional>
#include <vector>

#include "base/process.h"

namespace tessera {

// The blocks that were wanted last, up to a number. All members may be called from several threads
// at once.
class RecentBlocks {
 public:
  using Bytes = std::shared_ptr<const std::vector<std::byte>>;
  struct Key {
    std::uint64_t source = 0;
    std::uint64_t block = 0;
    bool operator==(const Key&) const = default;
  };

  // A block that its owner reads while others wait for it. So whoever waits must own none.
  class Claim {
   public:
    Claim(RecentBlocks& blocks, Key key, std::promise<Bytes> promise);
    ~Claim();  // without keep(): those who wait read it themselves
    Claim(Claim&& other) noexcept;
    Claim& operator=(Claim&&) = delete;

    void keep(Bytes bytes);
    // Those who wait fail alike, instead of one after the other. Each gets an Error of its own.
    void fail(const std::exception_ptr& failure);

   private:
    RecentBlocks* blocks_;  // null: nothing is left to do
    Key key_;
    std::promise<Bytes> promise_;
  };

  // The state of a block: nothing; its bytes; or that another thread reads it.
  struct Known {
    Bytes bytes;
    bool is_coming = false;
  };

  explicit RecentBlocks(std::size_t most) : most_(most), spare_(std::make_shared<Spare>(most)) {}

  [[nodiscard]] Known find(Key key);
  // The same; `claim` is made if nothing is known: then the caller has to read.
  [[nodiscard]] Known find(Key key, std::optional<Claim>& claim);
  // The block if it is there or coming, else null. Waits, and then throws what its reader has
  // thrown, unless that was a stop of the reader's own; `cancelled` if this thread has one
  // (HeedStop).
  [[nodiscard]] Bytes wait_for(Key key);
  // The block, which `read` brings if no other thread does. Waits likewise.
  [[nodiscard]] Bytes get(Key key, const std::function<Bytes()>& read);
  // Somebody has taken a part of the block, its beginning or its end among them: it is not kept
  // when both were taken.
  void took(Key key, bool begin, bool end);
  // Memory for a block: if possible that of one that nobody has any more, which costs no page
  // faults.
  [[nodiscard]] std::shared_ptr<std::vector<std::byte>> room(std::size_t size);

 private:
  struct Entry {
    Key key;
    MadeHere reader = {};  // a child of fork() has none of its parent's threads to wait for
    std::shared_future<Bytes> bytes;  // null: reading has failed
    bool is_begun = false;            // its beginning was taken
    bool is_ended = false;            // its end was
  };

  // Memory of blocks that nobody has any more: of as many, at most, as are kept. So it grows only
  // with what was in use at one time. Blocks may outlive what kept them.
  struct Spare {
    explicit Spare(std::size_t count) : most(count) { memory.reserve(count); }
    const std::size_t most;
    ShortMutex mutex;
    std::vector<std::unique_ptr<std::vector<std::byte>>> memory;  // guarded by mutex
  };

  [[nodiscard]] static Known known_of(const Entry& entry);
  [[nodiscard]] Entry* use(Key key);
  [[nodiscard]] std::shared_future<Bytes> future_of(Key key);
  void forget(Key key);

  const std::size_t most_;
  ShortMutex mutex_;
  std::list<Entry> recent_;  // guarded by mutex_; the last used one first
  const std::shared_ptr<Spare> spare_;
};

// What is checked by blocks on this thread while it lives, and on those that work for it
// (parallel_for), shares its blocks: neighbours in a file that have one in common read it once.
class SharedBlocks {
 public:
  // Keeps so many blocks, at most, for who comes later. One goes when its beginning and its end
  // were taken: then all of it was, or will be by threads that are at work on it.
  explicit SharedBlocks(std::size_t most);
  ~SharedBlocks();
  SharedBlocks(const SharedBlocks&) = delete;
  SharedBlocks& operator=(const SharedBlocks&) = delete;

  // Those of this thread's job; null: it shares none.
  [[nodiscard]] static RecentBlocks* here() noexcept;

 private:
  RecentBlocks blocks_;
  RecentBlocks* const outer_;
};

}  // namespace tessera
