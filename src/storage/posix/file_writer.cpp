#include "storage/posix/file_writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/checked.h"
#include "storage/posix/system.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr std::uint64_t kWriteBackStep = 8 << 20;   // bytes that start write-back
constexpr std::uint64_t kWriteBackLeast = 1 << 20;  // less than this is not worth a call
constexpr std::size_t kWriters = 16;                // whose runs are followed at once
constexpr int kIdleWrites = 3;                      // one after another are an error

// Only starts the write: waiting here would take the write's error away from fsync.
void start_write_back(int fd, std::uint64_t begin, std::uint64_t end) {
  ::sync_file_range(fd, static_cast<off_t>(begin), static_cast<off_t>(end - begin),
                    SYNC_FILE_RANGE_WRITE);
}

// Some file systems tell only at a close that a write has failed. The file is needed after this, so
// it is a second descriptor that is closed; the system closes it also when a signal interrupts.
void require_closing(int fd, const std::string& path) {
  const int second = ::fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (second < 0) throw_errno(errno, "close", path);
  if (::close(second) != 0 && errno != EINTR) throw_errno(errno, "close", path);
}

}  // namespace

void FileWriter::reserve(std::uint64_t size) {
  if (size == 0 || !std::in_range<off_t>(size)) return;
  const auto allocate = [&] {
    return ::fallocate(fd_.get(), FALLOC_FL_KEEP_SIZE, 0, static_cast<off_t>(size));
  };
  if (uninterrupted(allocate) == 0) return;
  if (error_code_of(errno) == ErrorCode::out_of_space) {
    throw_errno(errno, "reserve " + std::to_string(size) + " bytes", path_);
  }
}

void FileWriter::write_at(std::uint64_t offset, ByteView bytes) {
  (void)narrow<off_t>(checked_add<std::uint64_t>(offset, bytes.size()));
  for (int idle = 0; !bytes.empty();) {
    const auto part = bytes.first(std::min<std::size_t>(bytes.size(), kWriteBackStep));
    const ssize_t wrote = transferred(
        [&] { return ::pwrite(fd_.get(), part.data(), part.size(), static_cast<off_t>(offset)); });
    if (wrote < 0) throw_errno(errno, "write", path_);
    idle = wrote == 0 ? idle + 1 : 0;
    if (idle == kIdleWrites) {
      throw Error(ErrorCode::io, "writes made no progress").at_path(path_).at_offset(offset);
    }
    const auto count = static_cast<std::uint64_t>(wrote);
    if (count > 0) note_written(offset, offset + count);
    bytes = bytes.subspan(count);
    offset += count;
  }
}

FileWriter::Run FileWriter::next_to_write_back(std::uint64_t begin, std::uint64_t end) {
  Run start;
  const std::lock_guard lock(mutex_);
  end_ = std::max(end_, end);
  auto run = std::ranges::find(pending_, begin, &Run::end);
  if (run == pending_.end()) {
    if (pending_.size() == kWriters) {
      start = pending_.front();
      pending_.erase(pending_.begin());
    }
    run = pending_.insert(pending_.end(), {begin, begin});
  }
  run->end = end;
  if (run->end - run->begin >= kWriteBackStep) {
    start = *run;
    run->begin = run->end;  // where this writer goes on
  }
  return start;
}

void FileWriter::note_written(std::uint64_t begin, std::uint64_t end) {
  const Run start = next_to_write_back(begin, end);
  if (start.end - start.begin >= kWriteBackLeast)
    start_write_back(fd_.get(), start.begin, start.end);
}

void FileWriter::keep(std::uint64_t end) {
  const std::lock_guard lock(mutex_);
  end_ = std::max(end_, end);
}

Fd FileWriter::finish() {
  // The reservation may reach past what was written.
  const auto cut = [this] { return ::ftruncate(fd_.get(), static_cast<off_t>(end_)); };
  if (uninterrupted(cut) != 0) throw_errno(errno, "truncate", path_);
  sync_open(fd_.get(), path_);
  require_closing(fd_.get(), path_);
  return std::exchange(fd_, Fd());
}

void FileWriter::sync() {
  sync_open(fd_.get(), path_);
  require_closing(fd_.get(), path_);
  fd_ = Fd();
}

}  // namespace tessera
