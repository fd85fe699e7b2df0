#include "checkpoint/background/arena.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "base/log.h"
#include "base/parallel.h"
#include "base/process.h"
#include "io/source.h"
#include "storage/arena/arenas.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr std::uint64_t kTouchedAtOnce = 64U << 20U;

std::string bytes_text(std::uint64_t bytes) {
  return std::to_string(bytes) + " bytes";
}

// Writes to each page, so that the system has to find it now and not while a save waits.
void touch(std::byte* memory, std::uint64_t bytes, int threads) {
  const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  const std::uint64_t parts = (bytes + kTouchedAtOnce - 1) / kTouchedAtOnce;
  parallel_for(threads, parts, [&](std::size_t part) {
    const std::uint64_t begin = part * kTouchedAtOnce;
    const std::uint64_t end = std::min(begin + kTouchedAtOnce, bytes);
    for (std::uint64_t at = begin; at < end; at += page) memory[at] = std::byte{0};
  });
}

}  // namespace

Arena::Arena(std::uint64_t bytes, int threads, bool shared)
    : fixed_(bytes), is_shared_(shared), threads_(threads) {
  if (fixed_ > 0) make(bytes);
}

std::uint64_t Arena::mapped_size(std::uint64_t bytes) const {
  return is_shared_ ? count_place(bytes) + kCountBytes : bytes;
}

std::byte* Arena::map(std::uint64_t bytes) {
  void* mapped = MAP_FAILED;
  const std::uint64_t mapped_bytes = mapped_size(bytes);
  if (!is_shared_) {
    mapped =
        ::mmap(nullptr, mapped_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  } else {
    fd_ = Fd(::memfd_create("tessera-arena", MFD_CLOEXEC));
    if (fd_ && ::ftruncate(fd_.get(), static_cast<off_t>(mapped_bytes)) == 0)
      mapped = ::mmap(nullptr, mapped_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0);
  }
  if (mapped != MAP_FAILED) return static_cast<std::byte*>(mapped);
  throw Error(ErrorCode::io, "no memory for an arena of " + bytes_text(bytes) + ": " +
                                 std::system_category().message(errno));
}

void Arena::make(std::uint64_t bytes) {
  lock_.reset();
  is_lock_asked_for_ = false;
  memory_.reset();  // before there is another one
  fd_ = Fd();
  size_ = 0;
  std::byte* const mapped = map(bytes);
  const MadeHere made_here;
  const auto unmap = [size = mapped_size(bytes), made_here](std::byte* memory) {
    if (made_here) ::munmap(memory, size);  // a child may have something else there
  };
  memory_ = std::shared_ptr<std::byte>(mapped, unmap);
  ::madvise(mapped, mapped_size(bytes), MADV_DONTFORK);
  ::madvise(mapped, bytes, MADV_HUGEPAGE);  // fewer faults, where the system has such pages
  touch(memory_.get(), bytes, threads_);
  size_ = bytes;
  ++generation_;
}

bool Arena::lock_pages(DeviceMemory& device) {
  if (memory_ && !std::exchange(is_lock_asked_for_, true))
    lock_ = device.lock_pages({memory_.get(), static_cast<std::size_t>(size_)});
  return lock_ != nullptr;
}

MutableByteView Arena::room(std::uint64_t bytes) {
  if (fixed_ > 0 && bytes > fixed_) {
    throw Error(ErrorCode::limit, "the save needs " + bytes_text(bytes) + " of an arena of " +
                                      bytes_text(fixed_) + " (WriterOptions::bytes)");
  }
  if (bytes > size_) {
    if (memory_) {
      log(LogLevel::info, "the arena of a CheckpointWriter grows from " + bytes_text(size_) +
                              " to " + bytes_text(bytes));
    }
    make(std::max(bytes, fixed_));
  }
  make_unread();
  used_ = bytes;
  return {memory_.get(), static_cast<std::size_t>(bytes)};
}

// A training does not wait for who reads its last snapshot.
void Arena::make_unread() {
  if (!is_shared_ || !memory_ || begin_overwriting(fd_, size_)) return;
  log(LogLevel::info, "the last snapshot is being read: the next one gets memory of its own, " +
                          bytes_text(size_) + " more until that ends");
  make(size_);
}

std::uint64_t Arena::overwrites() const {
  return is_shared_ && memory_ ? overwrites_of(fd_, size_) : 0;
}

void Pace::pass(std::uint64_t bytes) {
  using Clock = std::chrono::steady_clock;
  constexpr Clock::duration kBetweenLooks = std::chrono::milliseconds(50);
  const std::chrono::duration<double> takes(static_cast<double>(bytes) /
                                            static_cast<double>(rate_));
  Clock::time_point mine;
  {
    const std::lock_guard lock(mutex_);
    mine = std::max(next_, Clock::now());
    next_ = mine + std::chrono::duration_cast<Clock::duration>(takes);
    mine = next_;
  }
  for (auto now = Clock::now(); now < mine; now = Clock::now()) {
    if (HeedStop::is_requested()) throw_cancelled();
    std::this_thread::sleep_for(std::min(mine - now, kBetweenLooks));
  }
}

namespace {

class PacedSource final : public ByteSource {
 public:
  PacedSource(ByteView bytes, std::shared_ptr<std::byte> owner, std::shared_ptr<Pace> pace)
      : bytes_(bytes), owner_(std::move(owner)), pace_(std::move(pace)) {}

  [[nodiscard]] std::uint64_t size() const override { return bytes_.size(); }
  void read_at(std::uint64_t offset, MutableByteView out) const override {
    require_range(*this, offset, out.size());
    pace_->pass(out.size());
    if (!out.empty()) std::memcpy(out.data(), bytes_.data() + offset, out.size());
  }
  [[nodiscard]] const std::string& name() const override { return name_; }

 private:
  const std::string name_ = "arena";
  const ByteView bytes_;
  const std::shared_ptr<std::byte> owner_;
  const std::shared_ptr<Pace> pace_;
};

}  // namespace

std::shared_ptr<ByteSource> paced_source(ByteView bytes, std::shared_ptr<std::byte> owner,
                                         std::shared_ptr<Pace> pace) {
  return std::make_shared<PacedSource>(bytes, std::move(owner), std::move(pace));
}

}  // namespace tessera
