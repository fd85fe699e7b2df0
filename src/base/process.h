// The process and the machine, as the library knows them.
#pragma once

#include <unistd.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/library.h"

namespace tessera {

// What a child of fork() finds. It has the memory of its parent and one thread: what another thread
// had locked at that moment stays locked, and connections are the parent's. A DataLoader forks
// workers that read from a checkpoint which its process has open. docs/design/forks.md lists what
// is guarded how.

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

// No other thread forks while one lives, so that no child finds half of what is done meanwhile. For
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

// What the library knows of the environment. Nothing that Python calls asks getenv() or `environ`
// elsewhere: their memory moves when another thread sets a variable.

// All of it, as "NAME=value", in the system's order.
using Variables = std::vector<std::string>;
[[nodiscard]] std::shared_ptr<const Variables> variables();

// The value of one; none: it is not set.
[[nodiscard]] std::optional<std::string> variable_of(const Variables& all, std::string_view name);
[[nodiscard]] std::optional<std::string> environment_variable(std::string_view name);

// The name of this machine.

// Empty if the system does not say.
[[nodiscard]] inline std::string host_name() {
  std::array<char, 256> name{};
  if (::gethostname(name.data(), name.size() - 1) != 0) return "";
  return name.data();
}

// Names that no other process picks.

// One attempt at writing something, in lower-case hex digits.
inline constexpr std::size_t kAttemptDigits = 12;
[[nodiscard]] std::string random_attempt();
// Whether random_attempt() could have written `text`.
[[nodiscard]] bool is_attempt(std::string_view text);

// A version 4 UUID, as torch names a save.
[[nodiscard]] std::string random_uuid();

// A file descriptor with an owner.

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) noexcept : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd() {
    if (fd_ >= 0) ::close(fd_);
  }
  void release() noexcept { fd_ = -1; }  // it is closed, or another owns it
  [[nodiscard]] int get() const noexcept { return fd_; }
  [[nodiscard]] explicit operator bool() const noexcept { return fd_ >= 0; }

 private:
  int fd_ = -1;  // -1: none
};

// Memory that was freed and does not come again.
//
// glibc keeps freed blocks below 32 MiB for later, and when a later block is aligned, as tensors
// are, it often cannot take the place of one of the same size: what a model's construction frees
// could stay with the process for good, several times the model. malloc_trim gives the pages of all
// free blocks back, wherever they lie; it changes no setting, and costs about what the freed bytes
// cost when they were first touched.

// Says that this thread has freed `bytes`. Once that is 16 MiB in the process since the last time,
// they go back to the system. Any thread. Does nothing where there is no glibc.
void note_freed(std::uint64_t bytes);

}  // namespace tessera
