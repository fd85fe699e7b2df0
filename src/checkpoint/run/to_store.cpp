#include "checkpoint/run/to_store.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <thread>

#include "base/process.h"
#include "checkpoint/open/kinds.h"
#include "checkpoint/open/located.h"
#include "checkpoint/run/steps.h"
#include "checkpoint/run/upload.h"
#include "checkpoint/save/place.h"
#include "comm/confer.h"
#include "comm/long_work.h"
#include "comm/message.h"
#include "storage/posix/lock.h"
#include "storage/posix/system.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr const char* kToStore = "making a directory to stage a checkpoint";
constexpr const char* kStart = "tessera-staged-";

std::string base_directory() {
  const std::string given = environment_variable("TMPDIR").value_or(std::string());
  return given.empty() ? "/tmp" : without_slashes(given);
}

bool is_own_directory(const Fd& fd) {
  struct stat status {};
  return ::fstat(fd.get(), &status) == 0 && status.st_uid == ::geteuid() &&
         (status.st_mode & (S_IRWXG | S_IRWXO)) == 0;
}

// None: another process looks whether it is abandoned, or has removed it, because nobody had its
// lock yet.
LockedFd try_make(const std::string& path) {
  if (::mkdir(path.c_str(), S_IRWXU) != 0 && errno != EEXIST)
    throw_errno(errno, "create directory", path);
  Fd fd = opened(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
  if (!fd && errno == ENOENT) return {};
  if (!fd) throw_errno(errno, "open directory", path);
  if (!is_own_directory(fd))
    throw Error(ErrorCode::unsafe, "a directory of another user's is there").at_path(path);
  if (try_lock(fd.get(), LockKind::shared) == Locked::no || !is_at(id_of(fd.get()), path))
    return {};
  return LockedFd(std::move(fd));
}

LockedFd made(const std::string& path) {
  constexpr int kTries = 1000;
  constexpr std::chrono::milliseconds kLongestPause{10};  // they end after ten seconds
  for (int i = 0; i < kTries; ++i) {
    if (LockedFd fd = try_make(path)) return fd;
    // The other may have to wait for a processor.
    std::this_thread::sleep_for(std::min(std::chrono::milliseconds{i}, kLongestPause));
  }
  throw Error(ErrorCode::conflict, "others keep removing the directory").at_path(path);
}

}  // namespace

Staging::Staging(Group& group) {
  const auto draw = [](const Bytes&) {
    return to_bytes(base_directory() + "/" + kStart + random_attempt());
  };
  path_ = to_text(confer(group, kToStore, {[] { return Bytes(); }, combine_nothing, draw}));
  agree(group, kToStore, [this] {
    const std::string base = directory_of(path_);
    make_directories(base);
    remove_abandoned_attempts(base, kStart, std::filesystem::file_type::directory);
    lock_ = made(path_);
  });
}

Staging::~Staging() {
  if (!made_here_) return;
  lock_ = LockedFd();
  remove_abandoned(path_, Hosts::this_one);
}

std::string Staging::place_for(const std::string& target) const {
  const std::string name = std::filesystem::path(without_slashes(target)).filename().string();
  return path_ + "/" + (name.empty() ? "checkpoint" : name);
}

bool needs_staging(const Location& target) {
  return target.store && !target.store->has_directories();
}

void require_target(const Location& target, const UploadOptions& options) {
  const auto store = directory_store(target);
  if (!options.overwrite) require_no_marker(*store);
  store->require_writable(probe_name(random_attempt()), options.single_writer);
}

void upload_staged(const Location& staged, const Location& target, CheckpointKind kind,
                   const UploadOptions& options, Group& group) {
  if (is_olmo_kind(kind)) {
    (void)upload(staged, target, options, group);
    return;
  }
  // A set of safetensors is in rank 0's directory whole.
  agree_on_long_work(group, "uploading a checkpoint", options.stop,
                     [&](const std::stop_token& stop) {
                       if (group.rank() != 0) return;
                       UploadOptions how = options;
                       how.stop = stop;
                       (void)upload_unmarked(staged, target, how);
                     });
}

ProgressHook first_half(const ProgressHook& all) {
  if (!all) return {};
  return [all](const Progress& half) { all({half.done, half.total + half.total}); };
}

ProgressHook second_half(const ProgressHook& all) {
  if (!all) return {};
  return [all](const Progress& half) { all({half.total + half.done, half.total + half.total}); };
}

}  // namespace tessera
