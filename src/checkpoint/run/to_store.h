// A directory on a disk of this machine, for what a store takes only whole.
#pragma once

#include <string>

#include "base/process.h"
#include "storage/posix/lock.h"
#include "tessera/comm.h"
#include "tessera/copy.h"
#include "tessera/storage.h"

namespace tessera {

// TMPDIR/tessera-staged-<attempt>, or below /tmp: the same on all ranks, whose hosts may each have
// one of their own. The last rank of a host that lets go of it removes it, and the next staging
// there what killed ranks have left.
class Staging {
 public:
  // Rank 0's TMPDIR counts. Collective.
  explicit Staging(Group& group);
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;
  ~Staging();

  // The place where the checkpoint comes to be that goes to a place of this name.
  [[nodiscard]] std::string place_for(const std::string& target) const;

 private:
  std::string path_;
  LockedFd lock_;
  MadeHere made_here_;
};

// Checkpoints that a store takes only whole: files which several ranks fill, and directories which
// have to appear at once. They are made on a disk, then uploaded, the marker last.

enum class CheckpointKind : std::uint8_t;

// Whether a target is in a store that has neither such files nor such directories.
[[nodiscard]] bool needs_staging(const Location& target);

// What an upload asks of the target that can be asked before anything is made for it: throws
// `already_exists` for a checkpoint that must not be replaced, and what the store refuses
// (Store::require_writable). By one process.
void require_target(const Location& target, const UploadOptions& options);

// Uploads the checkpoint of kind `kind` that ranks have made at `staged`. Collective.
void upload_staged(const Location& staged, const Location& target, CheckpointKind kind,
                   const UploadOptions& options, Group& group);

// The progress of the first or the second of two halves of a job.
[[nodiscard]] ProgressHook first_half(const ProgressHook& all);
[[nodiscard]] ProgressHook second_half(const ProgressHook& all);

// What SaveOptions and ConvertOptions say of the upload that follows.
template <typename Options>
[[nodiscard]] UploadOptions options_to_upload(const Options& options) {
  return {.overwrite = options.overwrite,
          .single_writer = options.single_writer,
          .threads = options.threads,
          .progress = second_half(options.progress),
          .stop = options.stop};
}

}  // namespace tessera
