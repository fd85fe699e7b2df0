// Copies a checkpoint's directory to another store, so that nobody ever takes a part of it for all.
// docs/design/checkpointers-run.md has the protocol.
#pragma once

#include <cstdint>
#include <stop_token>

#include "tessera/comm.h"
#include "tessera/job.h"
#include "tessera/storage.h"

namespace [[gnu::visibility("default")]] tessera {

struct UploadOptions {
  // false: a checkpoint at the target, or data of another one, is `already_exists`. What an upload
  // of the same files left that was interrupted does not count.
  bool overwrite = false;
  bool single_writer = false;  // as SaveOptions has it
  int threads = 2;  // files that each rank copies at once, with a buffer of 8 MiB for each
  // Files that the target has already are not copied again: they were read there and have the
  // source's digests or, of files without, its bytes; or the store itself made them as copies of
  // this version. If the target has this checkpoint's marker already, it is completed and checked
  // under it, also without `overwrite`. A failure leaves what was copied, and no new marker, to the
  // next upload with this option.
  bool resume = false;
  bool read_back = false;  // reads each file again from the target: a difference is `corrupt`
  ProgressHook progress = {};
  std::stop_token stop = {};
};

struct UploadReport {
  std::uint64_t files = 0;  // that this rank has copied
  std::uint64_t bytes = 0;
  std::uint64_t total_files = 0;  // of all ranks
  std::uint64_t total_bytes = 0;
  std::uint64_t whole_files = 0;   // of `files`: with `resume`, the target had them already
  std::uint64_t whole_bytes = 0;   // of them
  std::uint64_t server_bytes = 0;  // of `bytes`: copied by the store itself (StoreCopy)
};

// Copies the checkpoint in the directory `from` to the directory `to`; each is a path, a store, or
// with Location::name a directory in a store. Ranks that all see the same files share them by their
// sizes; files that only some ranks see are copied by one of these. Rank 0 must see the marker,
// `.metadata` of a DCP checkpoint or `config.yaml` of an OLMo kind: else `incomplete`. The marker
// is copied last, by rank 0, when all files are at the target with their sizes. With `overwrite`
// the old marker is removed first. So whoever asks for the marker finds the old checkpoint, none,
// or the new one. Files with digests are checked while they are read. Inside
// one object store the server copies data files; no bytes come here to be checked. The source must
// stay as it is: a file of another size, or another `.metadata`, is `conflict`.
//
// A directory of the source that may not be read is passed over where the checkpoint has no files
// in it; else that is `io`.
//
// A failure of any rank, or its request to stop, is one error on all of them; then no marker is
// there, and what was copied is removed again. A stop has no effect once the marker is on its way;
// where the target is silent then, that is `timeout`, and the checkpoint may be there. If ranks
// lose one another during the last step, they cannot know whether the marker came to be, and leave
// everything. Collective.
UploadReport upload(const Location& from, const Location& to, const UploadOptions& options,
                    Group& group);
// The same by one process.
UploadReport upload(const Location& from, const Location& to, const UploadOptions& options = {});

}  // namespace tessera
