// What processes of one host share: memory without a name, words to sleep on.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "base/host_process.h"
#include "base/process.h"

namespace tessera::same_host {

// Sleeping until a word that processes share changes. std::atomic::wait is for one process only.

// Lives in shared memory; written by one rank, read by all.
using SharedWord = std::atomic<std::uint32_t>;
static_assert(SharedWord::is_always_lock_free && sizeof(SharedWord) == 4);

// Returns when the word is not `value` (perhaps at once), when somebody calls wake_all, after
// `at_most`, or for no reason: the caller looks again.
void sleep_while(SharedWord& word, std::uint32_t value, std::chrono::milliseconds at_most) noexcept;
void wake_all(SharedWord& word) noexcept;

// Memory that the ranks of one host share and that has no name.
//
// It is a memfd: no file system shows it, so there is nothing to unlink and nothing to forget. The
// kernel frees it with the last mapping and descriptor, whichever way the processes end. Peers open
// it through /proc/PID/fd while its maker still holds the descriptor.

class Segment {
 public:
  // Zeros, all of it reserved: writing to it later cannot fail. Throws `out_of_space`,
  // `unsupported`.
  [[nodiscard]] static Segment create(std::size_t bytes);
  // Maps what process `pid` holds as `descriptor`. Throws `unsupported` when it cannot be reached
  // or is not a segment of this size.
  [[nodiscard]] static Segment attach(pid_t pid, int descriptor, std::size_t bytes);

  Segment(Segment&& other) noexcept
      : fd_(std::move(other.fd_)),
        data_(std::exchange(other.data_, nullptr)),
        bytes_(std::exchange(other.bytes_, 0)) {}
  Segment& operator=(Segment&& other) noexcept {
    std::swap(fd_, other.fd_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Segment();

  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t size() const noexcept { return bytes_; }

  // What peers attach to; -1 when closed.
  [[nodiscard]] int descriptor() const noexcept { return fd_.get(); }
  // From here on nobody can attach any more.
  void close_descriptor() noexcept { fd_ = Fd(); }

 private:
  Segment(Fd fd, std::size_t bytes);

  Fd fd_;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace tessera::same_host
