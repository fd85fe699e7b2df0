#include "storage/arena/arenas.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <optional>
#include <sstream>
#include <system_error>
#include <tuple>
#include <utility>

#include "io/source.h"
#include "storage/posix/system.h"
#include "storage/storage.h"
#include "tessera/error.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kNoticeLine = "a snapshot of tessera";

std::string notice_directory() {
  const auto named = environment_variable("TESSERA_ARENA_DIR");
  return named.value_or("/tmp/tessera-arenas-" + std::to_string(::geteuid()));
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

std::string text_of(const KeptPart& part) {
  std::ostringstream text;
  text << kNoticeLine << '\n'
       << part.place << '\n'
       << part.trainer << '\n'
       << same_host::to_text(part.process) << '\n'
       << part.writer << ' ' << part.number << ' ' << part.rank << ' ' << part.size << '\n';
  for (const KeptObject& one : part.objects) {
    text << one.name << ' ' << one.fd << ' ' << one.bytes << ' ' << one.device << ' ' << one.inode
         << '\n';
  }
  return text.str();
}

// None: no such text.
std::optional<KeptPart> part_of(const std::string& content) {
  std::istringstream text(content);
  std::string first, process;
  KeptPart part;
  std::getline(text, first);
  std::getline(text, part.place);
  std::getline(text, part.trainer);
  std::getline(text, process);
  text >> part.writer >> part.number >> part.rank >> part.size;
  if (!text || first != kNoticeLine || part.rank < 0 || part.size <= part.rank) return std::nullopt;
  try {
    part.process = same_host::process_from_text(process);
  } catch (const Error&) {
    return std::nullopt;
  }
  for (KeptObject one; text >> one.name >> one.fd >> one.bytes >> one.device >> one.inode;)
    part.objects.push_back(one);
  return part;
}

std::string content_of(const fs::path& file) {
  std::ifstream text(file);
  return {std::istreambuf_iterator<char>(text), {}};
}

std::string notice_name(const KeptPart& part) {
  return part.writer + "-" + std::to_string(part.rank);
}

// Bytes of a process's memory. They are copied by the kernel, so that memory which is cut off
// meanwhile is an error and not a signal.
class KeptSource final : public ByteSource {
 public:
  KeptSource(const KeptPart& part, const KeptObject& object, std::string name)
      : name_(std::move(name)), size_(object.bytes) {
    const std::string path =
        "/proc/" + std::to_string(part.process.pid) + "/fd/" + std::to_string(object.fd);
    memory_ = Fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    struct stat found {};
    const bool is_it = memory_ && ::fstat(memory_.get(), &found) == 0 &&
                       found.st_dev == object.device && found.st_ino == object.inode;
    if (is_it) return;
    throw Error(ErrorCode::not_found, "the process that kept this in memory has given it back")
        .at_path(name_);
  }
  [[nodiscard]] std::uint64_t size() const override { return size_; }
  void read_at(std::uint64_t offset, MutableByteView out) const override {
    require_range(*this, offset, out.size());
    for (std::size_t done = 0; done < out.size();) {
      const ssize_t got = transferred([&] {
        return ::pread(memory_.get(), out.data() + done, out.size() - done,
                       static_cast<off_t>(offset + done));
      });
      if (got < 0) throw_errno(errno, "pread", name_);
      if (got == 0) throw Error(ErrorCode::incomplete, "the memory was cut off").at_path(name_);
      done += static_cast<std::size_t>(got);
    }
  }
  [[nodiscard]] const std::string& name() const override { return name_; }

 private:
  const std::string name_;
  const std::uint64_t size_;
  Fd memory_;
};

class ArenaStore final : public Store {
 public:
  ArenaStore(std::string name, std::vector<KeptPart> parts)
      : name_(std::move(name)), parts_(std::move(parts)) {
    for (const KeptPart& part : parts_) {
      for (const KeptObject& object : part.objects) objects_[object.name] = {&part, &object};
    }
  }
  [[nodiscard]] const std::string& name() const override { return name_; }
  [[nodiscard]] std::vector<ObjectInfo> list(std::string_view prefix) const override {
    std::vector<ObjectInfo> found;
    for (const auto& [name, object] : objects_) {
      if (prefix.empty()) found.push_back({name, object.second->bytes});
    }
    return found;
  }
  [[nodiscard]] std::shared_ptr<ByteSource> open(std::string_view name) const override {
    require_safe_name(name, name_);
    const auto found = objects_.find(name);
    const std::string path = name_ + "/" + std::string(name);
    if (found == objects_.end())
      throw Error(ErrorCode::not_found, "there is no such object").at_path(path);
    return std::make_shared<KeptSource>(*found->second.first, *found->second.second, path);
  }
  [[nodiscard]] std::unique_ptr<ByteSink> create(std::string_view /*name*/, IfExists /*if_exists*/,
                                                 std::uint64_t /*size_hint*/) override {
    refuse();
  }
  void remove(std::string_view /*name*/) override { refuse(); }
  [[nodiscard]] bool is_read_only() const override { return true; }

 private:
  [[noreturn]] void refuse() const {
    throw Error(ErrorCode::unsupported, "a snapshot in memory is only read").at_path(name_);
  }

  const std::string name_;
  const std::vector<KeptPart> parts_;
  std::map<std::string, std::pair<const KeptPart*, const KeptObject*>, std::less<>> objects_;
};

// The newest of the snapshots of one place of which all ranks' parts are here.
std::vector<KeptPart> whole_snapshot(const std::vector<KeptPart>& parts) {
  std::map<std::pair<std::string, std::uint64_t>, std::map<int, KeptPart>> saves;
  for (const KeptPart& part : parts) saves[{part.writer, part.number}].emplace(part.rank, part);
  std::vector<KeptPart> newest;
  for (auto& [save, ranks] : saves) {
    const int size = ranks.begin()->second.size;
    if (std::ssize(ranks) != size) continue;
    newest.clear();
    for (auto& [rank, part] : ranks) newest.push_back(std::move(part));
  }
  return newest;
}

}  // namespace

KeptObject kept_object(std::string name, const Fd& memory, std::uint64_t bytes) {
  struct stat found {};
  if (::fstat(memory.get(), &found) != 0) throw_errno(errno, "fstat", name);
  return {std::move(name), memory.get(), bytes, found.st_dev, found.st_ino};
}

KeptNotice::KeptNotice(const KeptPart& part) {
  if (part.place.find('\n') != std::string::npos) {
    throw Error(ErrorCode::unsupported, "a place with a line break is not kept in memory")
        .at_path(part.place);
  }
  if (::mkdir(notice_directory().c_str(), S_IRWXU) != 0 && errno != EEXIST)
    throw_errno(errno, "mkdir", notice_directory());
  path_ = safe_directory() + "/" + notice_name(part);
  const std::string fresh = path_ + ".tmp";
  std::ofstream file(fresh, std::ios::trunc);
  file << text_of(part);
  file.close();
  std::error_code failed;
  if (file) fs::rename(fresh, path_, failed);
  if (!file || failed) throw Error(ErrorCode::io, "cannot be written").at_path(path_);
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
    if (at->path().extension() == ".tmp") continue;
    const auto part = part_of(content_of(at->path()));
    if (!part || notice_name(*part) != at->path().filename()) continue;
    // One of another host or container may live: what it says is not for us.
    const auto alive = same_host::is_alive(part->process);
    if (alive == true) found.push_back(*part);
    if (alive == false) fs::remove(at->path(), none);
    none.clear();
  }
  std::ranges::sort(found, {}, [](const KeptPart& part) {
    return std::tuple(part.place, part.writer, part.number, part.rank);
  });
  return found;
}

bool has_trainer(const KeptPart& part) {
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

std::shared_ptr<Store> arena_store(const std::string& place) {
  const std::string name = "arena://" + place;
  auto parts = kept_parts();
  std::erase_if(parts, [&place](const KeptPart& part) { return part.place != place; });
  auto whole = whole_snapshot(parts);
  if (!whole.empty()) return std::make_shared<ArenaStore>(name, std::move(whole));
  if (parts.empty()) {
    throw Error(ErrorCode::not_found, "no process on this host keeps a snapshot of that place")
        .at_path(name);
  }
  throw Error(ErrorCode::incomplete, "of " + std::to_string(parts.front().size) +
                                         " ranks this host keeps a part of " +
                                         std::to_string(parts.size()) + " alone")
      .at_path(name);
}

}  // namespace tessera
