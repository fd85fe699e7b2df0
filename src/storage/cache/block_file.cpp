#include "storage/cache/block_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <span>

#include "base/digest.h"
#include "storage/posix/system.h"

namespace tessera {
namespace {

constexpr std::uint64_t kUnit = 1U << 20U;  // has a digest
constexpr std::uint64_t kMostUnits = 4;
constexpr std::time_t kFresh = 60;  // seconds, in which a use is not noted again

std::uint64_t units_of(std::uint64_t size) {
  return (size + kUnit - 1) / kUnit;
}

std::uint64_t trailer_bytes(std::uint64_t units) {
  return (units + 1) * sizeof(std::uint64_t);
}

// Of the block's bytes, if a block's file can have that size; else 0.
std::uint64_t size_in(std::uint64_t file_size) {
  for (std::uint64_t units = 1; units <= kMostUnits; ++units) {
    const std::uint64_t size = file_size - std::min(file_size, trailer_bytes(units));
    if (units_of(size) == units) return size;
  }
  return 0;
}

std::uint64_t seal_of(const BlockName& name, std::uint64_t size,
                      std::span<const std::uint64_t> digests) {
  std::string text = "block of tessera, version 1";
  text += '\0' + name.key + '\0' + name.block + '\0' + std::to_string(size);
  RunningDigest seal;
  seal.add(std::as_bytes(std::span(text)));
  seal.add(std::as_bytes(digests));
  return seal.value();
}

bool read_whole(const Fd& fd, std::uint64_t offset, MutableByteView out) {
  while (!out.empty()) {
    const ssize_t got = transferred(
        [&] { return ::pread(fd.get(), out.data(), out.size(), static_cast<off_t>(offset)); });
    if (got <= 0) return false;
    out = out.subspan(static_cast<std::size_t>(got));
    offset += static_cast<std::uint64_t>(got);
  }
  return true;
}

}  // namespace

std::vector<std::uint64_t> block_trailer(const BlockName& name, ByteView bytes) {
  std::vector<std::uint64_t> trailer;
  for (std::size_t at = 0; at < bytes.size(); at += kUnit)
    trailer.push_back(digest64(bytes.subspan(at, std::min<std::size_t>(kUnit, bytes.size() - at))));
  trailer.push_back(seal_of(name, bytes.size(), trailer));
  return trailer;
}

// O_NONBLOCK: a FIFO would otherwise wait for a writer.
BlockFile::BlockFile(const std::string& path, const BlockName& name, const CacheDirectory& owner)
    : fd_(opened(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK)) {
  struct stat status {};
  is_others_ =
      fd_ ? ::fstat(fd_.get(), &status) != 0 || !owner.owns_file(fd_.get()) : errno != ENOENT;
  if (!fd_ || is_others_) return;
  used_ = status.st_mtime;
  file_size_ = static_cast<std::uint64_t>(status.st_size);
  size_ = size_in(file_size_);
  is_sealed_ = size_ != 0 && read_trailer(name);
}

bool BlockFile::read_trailer(const BlockName& name) {
  trailer_.resize(units_of(size_) + 1);
  if (!read_whole(fd_, size_, std::as_writable_bytes(std::span(trailer_)))) return false;
  const auto digests = std::span<const std::uint64_t>(trailer_).first(trailer_.size() - 1);
  return trailer_.back() == seal_of(name, size_, digests);
}

void BlockFile::note_use() const {
  if (std::time(nullptr) - used_ > kFresh) (void)::futimens(fd_.get(), nullptr);
}

bool BlockFile::read(std::uint64_t within, MutableByteView out) const {
  std::vector<std::byte> scratch;
  while (!out.empty()) {
    const std::uint64_t unit = within / kUnit;
    const std::uint64_t begin = unit * kUnit;
    const auto size = static_cast<std::size_t>(std::min(kUnit, size_ - begin));
    const auto from = static_cast<std::size_t>(within - begin);
    const auto part = out.first(std::min(out.size(), size - from));
    MutableByteView whole = part;
    if (part.size() < size) {
      scratch.resize(size);
      whole = scratch;
    }
    if (!read_whole(fd_, begin, whole) || digest64(whole) != trailer_[unit]) return false;
    if (part.size() < size) std::memcpy(part.data(), scratch.data() + from, part.size());
    out = out.subspan(part.size());
    within += part.size();
  }
  return true;
}

}  // namespace tessera
