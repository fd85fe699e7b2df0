#include "storage/posix/system.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <linux/posix_acl.h>
#include <linux/posix_acl_xattr.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

#include "base/process.h"
#include "base/text.h"
#include "storage/storage.h"
#include "tessera/error.h"

namespace tessera {
namespace {

// Whether the directory is there. Throws for something else under its name.
bool is_directory(const std::string& directory) {
  struct stat status {};
  if (::stat(directory.c_str(), &status) != 0) return false;
  if (S_ISDIR(status.st_mode)) return true;
  throw Error(ErrorCode::already_exists, "a file is where a directory is needed")
      .at_path(directory);
}

// Behind the system's words, where a limit was reached that somebody can change.
std::string limit_of(int error_number) {
  if (error_number == ENFILE) return "; the limit is the system's, fs.file-max";
  rlimit limit{};
  if (error_number == EMFILE && ::getrlimit(RLIMIT_NOFILE, &limit) == 0)
    return "; the limit is " + std::to_string(limit.rlim_cur) + " open files (ulimit -n)";
  const bool is_limited = error_number == EFBIG && ::getrlimit(RLIMIT_FSIZE, &limit) == 0 &&
                          limit.rlim_cur != RLIM_INFINITY;
  if (!is_limited) return {};
  return "; the limit is " + std::to_string(limit.rlim_cur) + " bytes of a file (ulimit -f)";
}

std::optional<FileId> id_in(const struct stat& status) {
  return FileId{static_cast<std::uint64_t>(status.st_dev),
                static_cast<std::uint64_t>(status.st_ino)};
}

void set_type(DirectoryEntry& entry, unsigned char type) {
  struct stat status {};
  if (type == DT_UNKNOWN && ::lstat(entry.path.c_str(), &status) == 0)
    type = S_ISDIR(status.st_mode) ? DT_DIR : S_ISREG(status.st_mode) ? DT_REG : DT_LNK;
  entry.is_directory = type == DT_DIR;
  entry.is_regular_file = type == DT_REG;
  if (type == DT_LNK)
    entry.is_regular_file = ::stat(entry.path.c_str(), &status) == 0 && S_ISREG(status.st_mode);
}

// A POSIX ACL, as an extended attribute has it: a header and entries, their numbers little-endian.
class Acl {
 public:
  // Empty: there is none, or the file system has none.
  Acl(const std::string& path, const char* name) : bytes_(XATTR_SIZE_MAX, '\0') {
    const ssize_t size = ::getxattr(path.c_str(), name, bytes_.data(), bytes_.size());
    bytes_.resize(static_cast<std::size_t>(std::max<ssize_t>(size, 0)));
  }
  [[nodiscard]] bool empty() const { return bytes_.empty(); }
  // The rights of ACL_GROUP_OBJ and its like: three bits.
  [[nodiscard]] unsigned rights_of(unsigned tag) const {
    posix_acl_xattr_entry entry{};
    (void)find(tag, entry);
    return le16toh(entry.e_perm);
  }
  void limit(unsigned tag, unsigned rights) {
    posix_acl_xattr_entry entry{};
    const std::size_t at = find(tag, entry);
    if (at == bytes_.size()) return;
    entry.e_perm = htole16(static_cast<std::uint16_t>(le16toh(entry.e_perm) & rights));
    std::memcpy(&bytes_[at], &entry, sizeof entry);
  }
  [[nodiscard]] bool give(const std::string& path, const char* name) const {
    return ::setxattr(path.c_str(), name, bytes_.data(), bytes_.size(), 0) == 0;
  }

 private:
  // The place of the entry with this tag; the end: there is none.
  std::size_t find(unsigned tag, posix_acl_xattr_entry& entry) const {
    std::size_t at = sizeof(posix_acl_xattr_header);
    for (; at + sizeof entry <= bytes_.size(); at += sizeof entry) {
      std::memcpy(&entry, &bytes_[at], sizeof entry);
      if (le16toh(entry.e_tag) == tag) return at;
    }
    entry = {};
    return bytes_.size();
  }

  std::string bytes_;
};

constexpr const char* kAccess = "system.posix_acl_access";
constexpr const char* kDefault = "system.posix_acl_default";  // of what is made in a directory

// `mode` of `old`, changed to what `path` is to have: with an ACL the bits of the group are those
// of the mask, and say nothing of the group itself.
mode_t take_acl_of(const std::string& old, const std::string& path, mode_t mode, bool has_group) {
  Acl acl(old, kAccess);
  if (acl.empty()) {
    (void)::removexattr(path.c_str(), kAccess);  // from the directory
  } else {
    const mode_t group = acl.rights_of(ACL_GROUP_OBJ) << 3U;
    if (!has_group) acl.limit(ACL_GROUP_OBJ, mode & S_IRWXO);
    if (acl.give(path, kAccess)) return mode;
    mode &= ~mode_t{S_IRWXG} | group;
  }
  return has_group ? mode : mode & (~mode_t{S_IRWXG} | (mode & S_IRWXO) << 3U);
}

void take_default_acl_of(const std::string& old, const std::string& path) {
  const Acl acl(old, kDefault);
  if (acl.empty()) {
    (void)::removexattr(path.c_str(), kDefault);
  } else {
    (void)acl.give(path, kDefault);
  }
}

}  // namespace

ErrorCode error_code_of(int error_number) {
  if (is_one_of(error_number, ENOENT, ENOTDIR)) return ErrorCode::not_found;
  if (error_number == EEXIST) return ErrorCode::already_exists;
  if (is_one_of(error_number, ENOSPC, EDQUOT, EFBIG)) return ErrorCode::out_of_space;
  return ErrorCode::io;
}

void throw_errno(int error_number, const std::string& operation, const std::string& path) {
  if (error_number == EEXIST) {
    throw Error(ErrorCode::already_exists, operation + ": something of this name is there already")
        .at_path(path);
  }
  throw Error(
      error_code_of(error_number),
      operation + ": " + std::generic_category().message(error_number) + limit_of(error_number))
      .at_path(path);
}

bool is_of_one_host(const struct statfs& system) noexcept {
  constexpr std::uint64_t kXfs = 0x58465342, kZfs = 0x2fc12fc1;  // not in every magic.h
  constexpr std::uint64_t kTypes[] = {EXT4_SUPER_MAGIC, kXfs,       BTRFS_SUPER_MAGIC,
                                      F2FS_SUPER_MAGIC, kZfs,       OVERLAYFS_SUPER_MAGIC,
                                      TMPFS_MAGIC,      RAMFS_MAGIC};
  return std::ranges::find(kTypes, static_cast<std::uint64_t>(system.f_type)) != std::end(kTypes);
}

ssize_t transferred(const std::function<ssize_t()>& call) {
  constexpr int kAttempts = 3000;
  constexpr std::chrono::milliseconds kPause{10};
  ssize_t result = uninterrupted(call);
  for (int i = 0; result < 0 && errno == EAGAIN && i < kAttempts; ++i) {
    std::this_thread::sleep_for(kPause);
    result = uninterrupted(call);
  }
  return result;
}

Fd opened(const std::string& path, int flags) {
  return Fd(uninterrupted([&] { return ::open(path.c_str(), flags | O_CLOEXEC, 0666); }));
}

void sync_open(int fd, const std::string& path) {
  if (uninterrupted([fd] { return ::fsync(fd); }) != 0) throw_errno(errno, "fsync", path);
}

std::optional<FileId> id_of(const std::string& path) {
  struct stat status {};
  if (::lstat(path.c_str(), &status) != 0) return {};
  return id_in(status);
}

std::optional<FileId> id_behind(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) return {};
  return id_in(status);
}

std::optional<FileId> id_of(int fd) {
  struct stat status {};
  if (::fstat(fd, &status) != 0) return {};
  return id_in(status);
}

bool is_at(const std::optional<FileId>& file, const std::string& path) {
  return file && file == id_of(path);
}

uid_t owner_of_ours(const std::string& directory) {
  const std::string probe = directory + "/probe-" + random_attempt();
  if (::mkdir(probe.c_str(), 0700) != 0) return ::geteuid();
  struct stat status {};
  const bool known = ::lstat(probe.c_str(), &status) == 0;
  ::rmdir(probe.c_str());
  return known ? status.st_uid : ::geteuid();
}

void take_access_of(const std::string& old, const std::string& path) {
  struct stat was {};
  struct stat is {};
  if (::lstat(old.c_str(), &was) != 0 || ::stat(path.c_str(), &is) != 0) return;
  if ((was.st_mode & S_IFMT) != (is.st_mode & S_IFMT)) return;
  if ((was.st_uid != is.st_uid || was.st_gid != is.st_gid) &&
      ::chown(path.c_str(), was.st_uid, was.st_gid) != 0)
    (void)!::chown(path.c_str(), static_cast<uid_t>(-1), was.st_gid);
  const bool is_directory = S_ISDIR(was.st_mode);
  mode_t mode = is_directory ? (was.st_mode & 07777U) | S_IRWXU : was.st_mode & 0777U;
  const bool has_group = ::stat(path.c_str(), &is) == 0 && is.st_gid == was.st_gid;
  mode = take_acl_of(old, path, mode, has_group);
  if (is_directory) take_default_acl_of(old, path);
  if (::stat(path.c_str(), &is) == 0 && (is.st_mode & 07777U) != mode)
    (void)::chmod(path.c_str(), mode);
}

std::string end_of_links(const std::string& path) {
  constexpr int kMostLinks = 40;  // as many as Linux follows
  std::filesystem::path at = path;
  for (int i = 0; i < kMostLinks; ++i) {
    std::error_code error;
    const std::filesystem::path next = std::filesystem::read_symlink(at, error);
    if (error) return at.string();
    at = at.parent_path() / next;  // `next` alone if it is absolute
  }
  throw_errno(ELOOP, "follow the link", path);
}

bool lacks_flag(int error_number) {
  return is_one_of(error_number, EINVAL, ENOSYS);
}

std::string directory_of(const std::filesystem::path& path) {
  const std::string directory = path.parent_path().string();
  return directory.empty() ? "." : directory;
}

std::string without_slashes(std::string path) {
  while (path.size() > 1 && path.ends_with('/')) path.pop_back();
  return path;
}

void require_local(const std::string& path) {
  const std::string_view scheme = scheme_of(path);
  if (scheme.empty()) return;
  throw Error(ErrorCode::unsupported, "no store is built for " + std::string(scheme) +
                                          ":// URLs; paths of this machine are supported")
      .at_path(path);
}

std::optional<std::vector<DirectoryEntry>> entries_if_open(const std::string& directory) {
  const std::unique_ptr<DIR, int (*)(DIR*)> stream(::opendir(directory.c_str()), ::closedir);
  if (!stream) {
    if (errno == EACCES) return std::nullopt;
    if (is_one_of(errno, ENOENT, ENOTDIR)) return std::vector<DirectoryEntry>();
    throw_errno(errno, "list", directory);
  }
  std::vector<DirectoryEntry> entries;
  errno = 0;
  for (const dirent* next = nullptr; (next = ::readdir(stream.get())) != nullptr; errno = 0) {
    std::string name = static_cast<const char*>(next->d_name);
    if (is_one_of<std::string_view>(name, ".", "..")) continue;
    std::string path = directory;
    if (!path.ends_with('/')) path += '/';
    path += name;
    entries.push_back({std::move(path), std::move(name)});
    set_type(entries.back(), next->d_type);
  }
  if (errno != 0) throw_errno(errno, "list", directory);
  return entries;
}

std::vector<DirectoryEntry> entries_of(const std::string& directory) {
  auto entries = entries_if_open(directory);
  if (!entries) throw_errno(EACCES, "list", directory);
  return *std::move(entries);
}

std::vector<DirectoryEntry> readable_entries_of(const std::string& directory) {
  try {
    return entries_of(directory);
  } catch (const Error&) {
    return {};
  }
}

void remove_all(const std::string& path) {
  if (::unlink(path.c_str()) == 0 || is_one_of(errno, ENOENT, ENOTDIR)) return;
  if (!is_one_of(errno, EISDIR, EPERM)) throw_errno(errno, "remove", path);
  for (const DirectoryEntry& entry : entries_of(path)) remove_all(entry.path);
  if (::rmdir(path.c_str()) != 0 && errno != ENOENT) throw_errno(errno, "remove", path);
}

void sync_directory(const std::string& directory) {
  const Fd fd = opened(directory, O_RDONLY | O_DIRECTORY);
  if (!fd) throw_errno(errno, "open directory", directory);
  if (uninterrupted([&fd] { return ::fsync(fd.get()); }) == 0) return;
  // The file system cannot (vboxsf, 9p): then its names are as durable as it makes them by itself.
  if (!lacks_flag(errno)) throw_errno(errno, "fsync", directory);
}

void make_directories(const std::string& directory) {
  if (directory.empty() || is_directory(directory)) return;
  const std::string parent = std::filesystem::path(directory).parent_path().string();
  if (parent != directory) make_directories(parent);
  if (::mkdir(directory.c_str(), 0777) != 0) {
    if (errno != EEXIST) throw_errno(errno, "make directory", directory);
    return;  // somebody else was faster, and syncs it
  }
  sync_directory(directory_of(directory));
}

}  // namespace tessera
