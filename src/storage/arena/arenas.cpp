#include "storage/arena/arenas.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <system_error>
#include <tuple>
#include <utility>

#include "storage/posix/system.h"
#include "storage/storage.h"
#include "tessera/error.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kNoticeLine = "a snapshot of tessera";
constexpr std::string_view kUnfinished = ".tmp";

constexpr const char* kMemoryName = "a snapshot in memory";

std::uint64_t count_at(const Fd& memory, std::uint64_t at, const std::string& name) {
  std::uint64_t count = 0;
  const ssize_t got = transferred(
      [&] { return ::pread(memory.get(), &count, sizeof count, static_cast<off_t>(at)); });
  if (got != sizeof count) throw_errno(got < 0 ? errno : EIO, "pread", name);
  return count;
}

// Ours alone, since what lies there says whose memory is read. Empty: there is none.
std::string safe_directory() {
  std::string path = notice_directory();
  struct stat found {};
  if (::lstat(path.c_str(), &found) != 0) {
    if (errno == ENOENT) return {};
    throw_errno(errno, "lstat", path);
  }
  const bool is_own = S_ISDIR(found.st_mode) && found.st_uid == ::geteuid();
  if (is_own && (found.st_mode & (S_IRWXG | S_IRWXO)) == 0) return path;
  throw Error(ErrorCode::unsafe,
              "the directory of snapshots in memory has to be this user's and closed to others "
              "(mode 0700)")
      .at_path(path);
}

// Of a file of this user that a process may have written; empty: it is no such.
std::string content_of(const fs::path& path) {
  constexpr std::size_t kMost = 64 << 10;
  const Fd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  struct stat found {};
  if (!file || ::fstat(file.get(), &found) != 0 || !S_ISREG(found.st_mode)) return {};
  if (found.st_uid != ::geteuid() || found.st_size > static_cast<off_t>(kMost)) return {};
  std::string content(kMost, '\0');
  const ssize_t got =
      transferred([&] { return ::read(file.get(), content.data(), content.size()); });
  content.resize(static_cast<std::size_t>(std::max<ssize_t>(got, 0)));
  return content;
}

std::string notice_name(const KeptPart& part) {
  return part.writer + "-" + std::to_string(part.rank) + "-" + std::to_string(part.process.pid) +
         "-" + std::to_string(part.notice);
}

// Of one that was killed while it wrote.
void remove_unfinished(const fs::path& path) {
  constexpr std::chrono::minutes kLongestWrite{1};
  std::error_code none;
  const auto written = fs::last_write_time(path, none);
  if (!none && fs::file_time_type::clock::now() - written > kLongestWrite) fs::remove(path, none);
}

// Of this machine before it started: notices are of one host.
bool is_of_another_boot(const same_host::ProcessId& process) {
  const std::string boot = same_host::boot_id();
  return !boot.empty() && !process.host.starts_with(boot);
}

}  // namespace

std::string notice_text(const KeptPart& part) {
  std::ostringstream text;
  text << kNoticeLine << '\n'
       << part.place << '\n'
       << part.trainer << '\n'
       << part.peer << '\n'
       << part.run_mark << '\n'
       << same_host::to_text(part.process) << '\n'
       << part.writer << ' ' << part.number << ' ' << part.rank << ' ' << part.size << ' '
       << part.made << ' ' << part.is_step << ' ' << part.is_readers << ' ' << part.stored << ' '
       << part.notice << ' ' << part.objects.size() << '\n';
  for (const KeptObject& one : part.objects) {
    text << one.name << ' ' << one.fd << ' ' << one.bytes << ' ' << one.device << ' ' << one.inode
         << ' ' << one.count_at << ' ' << one.overwrites << '\n';
  }
  return text.str();
}

std::optional<KeptPart> part_from_notice(const std::string& content) {
  constexpr std::size_t kMostObjects = 64;
  std::istringstream text(content);
  std::string first, process;
  std::size_t objects = 0;
  KeptPart part;
  std::getline(text, first);
  std::getline(text, part.place);
  std::getline(text, part.trainer);
  std::getline(text, part.peer);
  std::getline(text, part.run_mark);
  std::getline(text, process);
  text >> part.writer >> part.number >> part.rank >> part.size >> part.made >> part.is_step >>
      part.is_readers >> part.stored >> part.notice >> objects;
  if (!text || first != kNoticeLine || part.rank < 0 || part.size <= part.rank) return std::nullopt;
  if (objects > kMostObjects) return std::nullopt;
  try {
    part.process = same_host::process_from_text(process);
  } catch (const Error&) {
    return std::nullopt;
  }
  part.objects.resize(objects);
  for (KeptObject& one : part.objects) {
    text >> one.name >> one.fd >> one.bytes >> one.device >> one.inode >> one.count_at >>
        one.overwrites;
  }
  return text ? std::optional(std::move(part)) : std::nullopt;
}

std::uint64_t count_place(std::uint64_t bytes) {
  return (bytes + kCountBytes - 1) / kCountBytes * kCountBytes;
}

bool begin_overwriting(const Fd& memory, std::uint64_t bytes) {
  if (::flock(memory.get(), LOCK_EX | LOCK_NB) != 0) return false;
  const std::shared_ptr<void> unlock(nullptr, [&](void*) { (void)::flock(memory.get(), LOCK_UN); });
  const std::uint64_t count = overwrites_of(memory, bytes) + 1;
  const auto at = static_cast<off_t>(count_place(bytes));
  const ssize_t put = transferred([&] { return ::pwrite(memory.get(), &count, sizeof count, at); });
  if (put != sizeof count) throw_errno(put < 0 ? errno : EIO, "pwrite", kMemoryName);
  return true;
}

std::uint64_t overwrites_of(const Fd& memory, std::uint64_t bytes) {
  return count_at(memory, count_place(bytes), kMemoryName);
}

KeptObject kept_object(std::string name, const Fd& memory, std::uint64_t bytes) {
  struct stat found {};
  if (::fstat(memory.get(), &found) != 0) throw_errno(errno, "fstat", name);
  return {std::move(name), memory.get(), bytes, found.st_dev, found.st_ino};
}

std::optional<Fd> open_kept(const same_host::ProcessId& process, const KeptObject& object) {
  const std::string path =
      "/proc/" + std::to_string(process.pid) + "/fd/" + std::to_string(object.fd);
  Fd memory(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat found {};
  if (!memory && errno != ENOENT && errno != ESRCH && errno != ENXIO)
    throw_errno(errno, "open", path);
  const bool is_it = memory && ::fstat(memory.get(), &found) == 0 && S_ISREG(found.st_mode) &&
                     found.st_dev == object.device && found.st_ino == object.inode;
  if (!is_it) return std::nullopt;
  if (object.count_at == 0) return memory;
  const bool is_locked = ::flock(memory.get(), LOCK_SH | LOCK_NB) == 0;
  if (!is_locked || count_at(memory, object.count_at, path) != object.overwrites)
    return std::nullopt;
  return memory;
}

std::string notice_directory() {
  const auto named = environment_variable("TESSERA_ARENA_DIR");
  return named.value_or("/tmp/tessera-arenas-" + std::to_string(::geteuid()));
}

std::string kept_place(const std::string& place) {
  std::string whole = place;
  if (!is_remote(place)) {
    std::error_code none;
    const fs::path absolute = fs::absolute(without_file_scheme(place), none);
    const fs::path followed = fs::weakly_canonical(absolute, none);
    whole = (none ? absolute.lexically_normal() : followed).string();
  }
  while (whole.size() > 1 && whole.ends_with('/')) whole.pop_back();
  return whole;
}

std::string notice_host() {
  return std::to_string(same_host::host_digest()) + " " + notice_directory();
}

ArenaNames arena_names(int rank) {
  const std::string start = "rank" + std::to_string(rank);
  return {start + ".tree", start + ".arena", start + ".digests"};
}

std::string save_name(const KeptPart& part) {
  return part.writer + "-" + std::to_string(part.number);
}

std::string save_place(const KeptPart& part) {
  return part.place + "#" + save_name(part);
}

// Numbers of directories are used again at once, so their birth counts, where the disk knows it.
std::string run_mark(const std::string& place) {
  if (is_remote(place)) return {};
  struct statx found {};
  const fs::path run = fs::path(kept_place(place)).parent_path();
  if (::statx(AT_FDCWD, run.c_str(), 0, STATX_INO | STATX_BTIME, &found) != 0) return {};
  std::ostringstream mark;
  mark << found.stx_dev_major << ':' << found.stx_dev_minor << ':' << found.stx_ino;
  if ((found.stx_mask & STATX_BTIME) != 0)
    mark << ':' << found.stx_btime.tv_sec << ':' << found.stx_btime.tv_nsec;
  return mark.str();
}

std::uint64_t host_time() {
  timespec now{};
  (void)::clock_gettime(CLOCK_BOOTTIME, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000U +
         static_cast<std::uint64_t>(now.tv_nsec);
}

KeptNotice::KeptNotice(KeptPart part) : part_(std::move(part)) {
  static std::atomic<std::uint64_t> last{0};
  part_.process = same_host::this_process();
  part_.notice = ++last;
  if (::mkdir(notice_directory().c_str(), S_IRWXU) != 0 && errno != EEXIST)
    throw_errno(errno, "mkdir", notice_directory());
  const std::string directory = safe_directory();
  if (directory.empty()) throw_errno(ENOENT, "lstat", notice_directory());
  path_ = directory + "/" + notice_name(part_);
  write();
}

void KeptNotice::renew(KeptPart part) {
  part.process = part_.process;
  part.notice = part_.notice;
  part_ = std::move(part);
  write();
}

void KeptNotice::write() {
  if (part_.place.find('\n') != std::string::npos) {
    throw Error(ErrorCode::unsupported, "a place with a line break is not kept in memory")
        .at_path(part_.place);
  }
  const std::string fresh = path_ + std::string(kUnfinished);
  std::ofstream file(fresh, std::ios::trunc);
  file << notice_text(part_);
  file.close();
  std::error_code failed;
  if (file) fs::rename(fresh, path_, failed);
  if (file && !failed) return;
  std::error_code none;
  fs::remove(fresh, none);
  throw Error(ErrorCode::io, "cannot be written").at_path(path_);
}

void KeptNotice::let_go() {
  part_.objects.clear();
  if (is_wanted()) write();
}

void KeptNotice::note_stored(std::uint64_t marker) {
  part_.stored = marker;
  if (is_wanted()) write();
}

void KeptNotice::note_end_of_trainer() {
  part_.trainer = kEnded;
  if (is_wanted()) write();
}

KeptNotice::~KeptNotice() {
  std::error_code none;
  if (made_here_) fs::remove(path_, none);
}

bool KeptNotice::is_wanted() const {
  std::error_code none;
  return fs::exists(path_, none);
}

std::vector<KeptPart> kept_parts() {
  const std::string directory = safe_directory();
  std::vector<KeptPart> found;
  if (directory.empty()) return found;
  std::error_code none;
  for (fs::directory_iterator at(directory, none), end; !none && at != end; at.increment(none)) {
    if (at->path().extension() == kUnfinished) {
      remove_unfinished(at->path());
      continue;
    }
    const auto part = part_from_notice(content_of(at->path()));
    if (!part || notice_name(*part) != at->path().filename()) continue;
    // One of another host or container may live: what it says is not for us.
    const auto alive = same_host::is_alive(part->process);
    if (alive == true) found.push_back(*part);
    if (alive == false || is_of_another_boot(part->process)) fs::remove(at->path(), none);
    none.clear();
  }
  std::ranges::sort(found, {}, [](const KeptPart& part) {
    return std::tuple(part.place, part.writer, part.number, part.rank);
  });
  return found;
}

bool has_trainer(const KeptPart& part) {
  if (part.trainer == kEnded) return false;
  try {
    return same_host::is_alive(same_host::process_from_text(part.trainer)) != false;
  } catch (const Error&) {
    return true;  // nobody has said who it is
  }
}

void forget(const std::vector<KeptPart>& parts) {
  const std::string directory = safe_directory();
  for (const KeptPart& part : parts) {
    std::error_code none;
    fs::remove(fs::path(directory) / notice_name(part), none);
  }
}

bool is_arena(std::string_view path) {
  return scheme_of(path) == "arena";
}

bool is_kept_in(const std::string& place, const std::string& above) {
  if (!place.starts_with(above)) return false;
  return place.size() == above.size() || above.ends_with('/') || place[above.size()] == '/';
}

}  // namespace tessera
