// What a child of fork() finds. It has the memory of its parent and one thread: what another thread
// had locked at that moment stays locked, and connections are the parent's. A DataLoader forks
// workers that read from a checkpoint which its process has open. docs/design/forks.md lists what
// is guarded how.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>

namespace tessera {

// Another one in each child.
[[nodiscard]] std::uint64_t process_number() noexcept;

// Whether this is still the process that an object was made in. What a child has a copy of it must
// not remove, abort or unlock.
class MadeHere {
 public:
  [[nodiscard]] explicit operator bool() const noexcept { return number_ == process_number(); }

 private:
  std::uint64_t number_ = process_number();
};

// Throws `invalid_argument` in a child of the process that connected the ranks of a mesh.
void require_own_connections(const MadeHere& made);

// While one lives no other thread forks, so that no child finds half of what is done meanwhile. For
// moments: what is done must not wait for a file, a server, another thread or Python's lock, nor
// call hooks. May be nested.
class NoFork {
 public:
  NoFork() noexcept { enter(); }
  ~NoFork() { leave(); }
  NoFork(const NoFork&) = delete;
  NoFork& operator=(const NoFork&) = delete;

 private:
  friend class ShortMutex;
  static void enter() noexcept;
  static void leave() noexcept;
};

// A mutex that is held for moments, as NoFork has it. A child finds it free, and what it guards
// whole.
class ShortMutex {
 public:
  void lock() {
    NoFork::enter();
    mutex_.lock();
  }
  void unlock() {
    mutex_.unlock();
    NoFork::leave();
  }

 private:
  std::mutex mutex_;
};

// One of these in each process: a child makes its own, and leaves its parent's alone.
template <typename T>
class PerProcess {
 public:
  PerProcess() = default;
  ~PerProcess() {
    if (number_ == process_number()) delete value_.load();
  }
  PerProcess(const PerProcess&) = delete;
  PerProcess& operator=(const PerProcess&) = delete;

  // `make` returns a std::unique_ptr<T>. Several threads may make one; one of these stays.
  template <typename Make>
  [[nodiscard]] T& get(const Make& make) const {
    if (number_.load(std::memory_order_acquire) == process_number()) return *value_.load();
    std::unique_ptr<T> made = make();
    const std::lock_guard lock(publishing_);
    if (number_ != process_number()) {
      value_ = made.release();
      number_.store(process_number(), std::memory_order_release);
    }
    return *value_.load();
  }

 private:
  mutable ShortMutex publishing_;
  mutable std::atomic<std::uint64_t> number_{0};  // of the process that value_ is for; 0: none
  mutable std::atomic<T*> value_{nullptr};
};

// A mutex that is held while files and servers are waited for. A child finds it free. Whatever is
// guarded by it changes under NoFork alone.
class SlowMutex {
 public:
  void lock() { own().lock(); }
  void unlock() { own().unlock(); }

 private:
  [[nodiscard]] std::mutex& own() const {
    return own_.get([] { return std::make_unique<std::mutex>(); });
  }

  PerProcess<std::mutex> own_;
};

}  // namespace tessera
