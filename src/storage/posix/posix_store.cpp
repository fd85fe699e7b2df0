#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <optional>

#include "base/process.h"
#include "io/source.h"
#include "storage/posix/atomic_file.h"
#include "storage/posix/lock.h"
#include "storage/posix/replaced_directory.h"
#include "storage/posix/system.h"
#include "storage/storage.h"
#include "tessera/error.h"
#include "tessera/storage.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

bool is_same(const timespec& a, const timespec& b) {
  return a.tv_sec == b.tv_sec && a.tv_nsec == b.tv_nsec;
}

// Whether a file has the same inode number whenever it is asked for: file systems in user space and
// those without inodes may give it another one when the kernel has forgotten it.
bool keeps_numbers(const struct statfs& system) {
  return is_of_one_host(system) || static_cast<std::uint64_t>(system.f_type) == NFS_SUPER_MAGIC;
}

// A file that replaces another one has an inode of its own, while both are there.
std::string version_of(const struct stat& status, bool has_number) {
  return (has_number ? std::to_string(status.st_ino) : std::string("0")) + "-" +
         std::to_string(status.st_size) + "-" + std::to_string(status.st_mtim.tv_sec) + "." +
         std::to_string(status.st_mtim.tv_nsec);
}

class FileSource final : public ByteSource {
 public:
  explicit FileSource(std::string path) : path_(std::move(path)) {
    fd_ = open();
    // The server of a network file system may have forgotten what the client remembers of the file.
    if (!fd_ && errno == ESTALE) fd_ = open();
    if (!fd_) throw_errno(errno, "open", path_);
    const struct stat status = status_of(fd_);
    if (!S_ISREG(status.st_mode)) throw Error(ErrorCode::io, "not a regular file").at_path(path_);
    size_ = static_cast<std::uint64_t>(status.st_size);
    changed_ = status.st_mtim;
    number_ = status.st_ino;
    struct statfs system {};
    version_ = version_of(status, ::fstatfs(fd_.get(), &system) == 0 && keeps_numbers(system));
  }

  [[nodiscard]] std::uint64_t size() const override { return size_; }

  void read_at(std::uint64_t offset, MutableByteView out) const override {
    read(offset, out);
    (void)require_unchanged();
  }

  // Whether the file was changed is asked once, when all is read.
  void read_ranges(std::span<const ReadRange> ranges) const override {
    for (const ReadRange& range : ranges) read(range.offset, range.out);
    if (!ranges.empty()) (void)require_unchanged();
  }

  [[nodiscard]] const std::string& name() const override { return path_; }
  [[nodiscard]] std::string version() const override { return version_; }

  // No memory is set aside for pages that may never be written. Null where the file system cannot
  // map, or the process has as many mappings as it may have.
  [[nodiscard]] std::shared_ptr<std::byte[]> map() const override {
    const Fd again = require_unchanged();
    if (size_ == 0) return nullptr;
    void* const pages = ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE,
                               again ? again.get() : fd_.get(), 0);
    if (pages == MAP_FAILED) return nullptr;
    return {static_cast<std::byte*>(pages),
            [size = size_](std::byte* begin) { (void)::munmap(begin, size); }};
  }

 private:
  // O_NONBLOCK: a FIFO in the file's place would otherwise wait for a writer.
  [[nodiscard]] Fd open() const { return opened(path_, O_RDONLY | O_NONBLOCK); }

  [[nodiscard]] struct stat status_of(const Fd& fd) const {
    struct stat status {};
    if (::fstat(fd.get(), &status) != 0) throw_errno(errno, "stat", path_);
    return status;
  }

  void read(std::uint64_t offset, MutableByteView out) const {
    require_range(*this, offset, out.size());
    Fd again;  // a handle that is stale is replaced once
    while (!out.empty()) {
      const int fd = again ? again.get() : fd_.get();
      const ssize_t got = transferred(
          [&] { return ::pread(fd, out.data(), out.size(), static_cast<off_t>(offset)); });
      if (got < 0 && errno == ESTALE && !again) {
        again = opened_again();
        continue;
      }
      if (got < 0) throw_errno(errno, "read", path_);
      if (got == 0) {
        throw Error(ErrorCode::incomplete, "the file has become shorter, expected " +
                                               std::to_string(out.size()) + " bytes more")
            .at_path(path_)
            .at_offset(offset);
      }
      out = out.subspan(static_cast<std::size_t>(got));
      offset += static_cast<std::uint64_t>(got);
    }
  }

  // The file of this name is opened; another one that has the name by now is not taken for it.
  [[nodiscard]] Fd opened_again() const {
    Fd fd = open();
    if (!fd) throw_errno(errno, "open again", path_);
    const struct stat status = status_of(fd);
    if (status.st_ino == number_ && is_as_before(status)) return fd;
    throw Error(ErrorCode::conflict, "the file was replaced while it was open").at_path(path_);
  }

  [[nodiscard]] bool is_as_before(const struct stat& status) const {
    return static_cast<std::uint64_t>(status.st_size) == size_ && is_same(status.st_mtim, changed_);
  }

  // What was read before and what is read now are of one file. One that was replaced stays open as
  // it was; one that was written into would give a mixture. Returns what takes the place of a
  // handle that is stale.
  [[nodiscard]] Fd require_unchanged() const {
    struct stat status {};
    if (::fstat(fd_.get(), &status) != 0) {
      if (errno != ESTALE) throw_errno(errno, "stat", path_);
      return opened_again();
    }
    if (is_as_before(status)) return {};
    throw Error(ErrorCode::conflict, "the file was changed while it was open").at_path(path_);
  }

  const std::string path_;
  Fd fd_;
  std::uint64_t size_ = 0;  // when it was opened
  timespec changed_{};      // the time of its last change, then
  ino_t number_ = 0;
  std::string version_;
};

// A file that other processes write into, too.
class SharedFile final : public ByteSink {
 public:
  explicit SharedFile(std::string path) : path_(std::move(path)) {
    make_directories(directory_of(path_));
    Fd fd = opened(path_, O_WRONLY | O_CREAT);
    if (!fd) throw_errno(errno, "open", path_);
    file_.emplace(std::move(fd), path_);
  }

  void write_at(std::uint64_t offset, ByteView bytes) override {
    open_file().write_at(offset, bytes);
  }
  void commit() override { open_file().sync(); }
  [[nodiscard]] const std::string& name() const override { return path_; }

 private:
  FileWriter& open_file() {
    if (!file_->is_open())
      throw Error(ErrorCode::invalid_argument, "the file is closed already").at_path(path_);
    return *file_;
  }

  const std::string path_;
  std::optional<FileWriter> file_;
};

// The lock of the store's directory, which is made if it is not there. One that is still empty goes
// again at the end.
class HeldDirectory final : public StoreHold {
 public:
  explicit HeldDirectory(std::string path) : path_(std::move(path)), made_(path_) {
    make_directories(path_);
    take_lock();
    require_there();
  }

  void require_there() const override {
    // Whoever wants may reach it by a link.
    const auto there = id_behind(path_);
    if (there && there == id_of(lock_.get())) return;
    throw Error(ErrorCode::conflict, "the directory was deleted while files were written into it")
        .at_path(path_);
  }

 private:
  // Another writer may have made the directory after we looked: then it is not ours to remove.
  void take_lock() try { lock_ = locked_directory(path_); } catch (const Error&) {
    made_.keep();
    throw;
  }

  const std::string path_;
  NewDirectories made_;
  LockedFd lock_;
};

class NewPosixDirectory final : public NewDirectory {
 public:
  // `root`: the store's directory; `name` is in it.
  NewPosixDirectory(const std::string& root, const std::string& name, IfExists if_exists)
      : directory_(root + "/" + name, if_exists),
        working_(directory_.working().substr(root.size() + 1)) {}

  [[nodiscard]] const std::string& working() const override { return working_; }
  void commit(const IsReplaced& is_replaced) override { directory_.commit(is_replaced); }

 private:
  ReplacedDirectory directory_;
  std::string working_;
};

// Calls `visit` for every regular file among `entries` and below; links to directories are not
// followed, and directories that are closed to us passed over.
template <typename Visit>
void for_each_file(const std::vector<DirectoryEntry>& entries, Visit visit) {
  for (const DirectoryEntry& entry : entries) {
    if (entry.is_directory) {
      if (const auto below = entries_if_open(entry.path)) for_each_file(*below, visit);
    }
    if (entry.is_regular_file) visit(entry);
  }
}

void remove_file(const std::string& path) {
  const bool absent = ::unlink(path.c_str()) == 0 || errno == ENOENT || errno == ENOTDIR;
  if (!absent) throw_errno(errno, "remove", path);
}

bool is_below(const fs::path& path, const fs::path& directory) {
  const auto [end, at] =
      std::mismatch(directory.begin(), directory.end(), path.begin(), path.end());
  return end == directory.end() && at != path.end();
}

// The cache of the huggingface hub: its NAME/snapshots/REVISION holds links to NAME/blobs.
bool is_in_hub_cache(const fs::path& file, const fs::path& root) {
  const fs::path revisions = root.parent_path();
  return revisions.filename() == "snapshots" && is_below(file, revisions.parent_path() / "blobs");
}

// A link inside the store leads to a file inside it, or to one that a hub's cache holds for it.
void require_inside(const std::string& path, const std::string& directory) {
  std::error_code error;
  const fs::path file = fs::canonical(path, error);
  if (error) return;  // opening it will say what is wrong
  const fs::path root = fs::canonical(directory.empty() ? "/" : directory, error);
  if (error) throw Error(ErrorCode::not_found, "the directory is gone").at_path(directory);
  if (is_below(file, root) || is_in_hub_cache(file, root)) return;
  throw Error(ErrorCode::unsafe, "a link that leaves the directory").at_path(path);
}

// From the root on, since files are opened when the process may be in another directory. Without
// slashes at the end; the root directory becomes empty, so that "/" and a name follow it.
std::string plain_directory(std::string directory) {
  while (directory.starts_with("./")) directory.erase(0, directory.find_first_not_of('/', 1));
  if (directory == ".") directory.clear();
  if (!directory.starts_with('/')) {
    std::error_code error;
    const std::string here = fs::current_path(error).string();
    if (error) throw_errno(error.value(), "find the working directory", directory);
    directory = directory.empty() ? here : (here == "/" ? "" : here) + "/" + directory;
  }
  while (directory.ends_with('/')) directory.pop_back();
  return directory;
}

class PosixStore final : public Store {
 public:
  explicit PosixStore(std::string directory) : directory_(std::move(directory)) {}
  [[nodiscard]] const std::string& name() const override { return directory_; }

  [[nodiscard]] std::vector<ObjectInfo> list(std::string_view prefix) const override {
    std::vector<ObjectInfo> found;
    const bool numbers = has_numbers();
    for_each_file(entries_of(start_of(prefix)),
                  [&](const DirectoryEntry& entry) { add_object(entry, numbers, found); });
    std::sort(found.begin(), found.end(), by_name);
    return found;
  }

  [[nodiscard]] std::vector<ObjectInfo> list_level(std::string_view prefix) const override {
    std::vector<ObjectInfo> found;
    const bool numbers = has_numbers();
    for (const DirectoryEntry& entry : entries_of(start_of(prefix)))
      add_object(entry, numbers, found);
    std::sort(found.begin(), found.end(), by_name);
    return found;
  }

  // Also links to directories.
  [[nodiscard]] std::vector<std::string> list_directories(std::string_view prefix) const override {
    std::vector<std::string> found;
    for (const DirectoryEntry& entry : entries_of(start_of(prefix))) {
      std::error_code none;
      if (entry.is_directory || fs::is_directory(entry.path, none)) found.push_back(entry.name);
    }
    std::ranges::sort(found);
    return found;
  }

  [[nodiscard]] bool exists(std::string_view name) const override {
    std::error_code error;
    return fs::is_regular_file(full(name), error);
  }

  [[nodiscard]] std::shared_ptr<ByteSource> open(std::string_view name) const override {
    const std::string path = full(name);
    require_inside(path, directory_);
    return std::make_shared<FileSource>(path);
  }

  [[nodiscard]] std::unique_ptr<ByteSink> create(std::string_view name, IfExists if_exists,
                                                 std::uint64_t size_hint) override {
    return std::make_unique<AtomicFile>(full(name), if_exists, size_hint);
  }

  [[nodiscard]] bool has_directories() const override { return true; }
  [[nodiscard]] std::unique_ptr<ByteSink> share(std::string_view name) override {
    return std::make_unique<SharedFile>(full(name));
  }

  [[nodiscard]] std::unique_ptr<NewDirectory> new_directory(std::string_view name,
                                                            IfExists if_exists) override {
    require_safe_name(name, directory_);
    return std::make_unique<NewPosixDirectory>(directory_, std::string(name), if_exists);
  }

  void remove(std::string_view name) override { remove_file(full(name)); }

  void remove_unfinished() override {
    std::vector<std::string> found;
    for_each_file(readable_entries_of(directory_ + "/"), [&](const DirectoryEntry& entry) {
      if (is_temporary_name(entry.name)) found.push_back(entry.path);
    });
    for (const std::string& path : found) remove_abandoned(path);
  }

  // Every commit has synced its directory by itself.
  void sync() override {}

  [[nodiscard]] std::unique_ptr<StoreHold> hold(std::string_view directory) override {
    if (!directory.empty()) return std::make_unique<HeldDirectory>(full(directory));
    return std::make_unique<HeldDirectory>(directory_.empty() ? "/" : directory_);
  }

  // A file system that does not say how large it is does not say how much is free either.
  [[nodiscard]] std::optional<std::uint64_t> free_bytes() const override {
    const auto status = file_system();
    if (!status || status->f_blocks == 0) return std::nullopt;
    return std::uint64_t{status->f_bavail} * static_cast<std::uint64_t>(status->f_frsize);
  }

  [[nodiscard]] bool may_show_late() const override {
    const auto status = file_system();
    return !status || !is_of_one_host(*status);
  }

 private:
  // That of the directory, or of the one above it in which it will be made; none: it cannot be
  // told.
  [[nodiscard]] std::optional<struct statfs> file_system() const {
    fs::path at = directory_.empty() ? "/" : directory_;
    struct statfs status {};
    while (::statfs(at.c_str(), &status) != 0) {
      if (errno != ENOENT || at == at.parent_path()) return std::nullopt;
      at = directory_of(at);
    }
    return status;
  }

  static bool by_name(const ObjectInfo& a, const ObjectInfo& b) { return a.name < b.name; }

  [[nodiscard]] bool has_numbers() const {
    const auto system = file_system();
    return system && keeps_numbers(*system);
  }

  void add_object(const DirectoryEntry& entry, bool has_numbers,
                  std::vector<ObjectInfo>& found) const {
    if (!entry.is_regular_file || is_temporary_name(entry.name)) return;
    struct stat own {};
    // A file that vanished between the listing and the stat is not there.
    if (::lstat(entry.path.c_str(), &own) != 0) return;
    struct stat status = own;
    if (S_ISLNK(own.st_mode) && ::stat(entry.path.c_str(), &status) != 0) return;
    // A link to an old file may be of a writer that lives.
    const time_t written = std::max(own.st_mtim.tv_sec, status.st_mtim.tv_sec);
    found.push_back({entry.path.substr(directory_.size() + 1),
                     static_cast<std::uint64_t>(status.st_size), version_of(status, has_numbers),
                     std::chrono::system_clock::from_time_t(written)});
  }

  // The path where a listing of what begins with `prefix` begins.
  [[nodiscard]] std::string start_of(std::string_view prefix) const {
    return prefix.empty() ? directory_ + "/" : full(prefix);
  }

  [[nodiscard]] std::string full(std::string_view name) const {
    require_safe_name(name, directory_);
    return directory_ + "/" + std::string(name);
  }

  const std::string directory_;  // no slash at the end
};

}  // namespace

std::shared_ptr<Store> posix_store(const std::string& directory) {
  require_local(directory);
  return std::make_shared<PosixStore>(plain_directory(directory));
}

}  // namespace tessera
