// Copies checkpoints byte for byte between any two places: disks, object stores, from web servers.
#pragma once

#include <cstdint>
#include <memory>
#include <stop_token>
#include <string>
#include <vector>

#include "tessera/comm.h"
#include "tessera/job.h"
#include "tessera/location.h"
#include "tessera/open_options.h"
#include "tessera/storage.h"

namespace [[gnu::visibility("default")]] tessera {

struct CopyOptions {
  // false: another checkpoint at the target is `already_exists`. What an interrupted copy of the
  // same source left does not count, nor does a copy that is whole.
  bool overwrite = false;
  bool single_writer = false;     // as SaveOptions has it
  bool allow_incomplete = false;  // copies also a directory that no reader would take as whole
  // How a directory is opened to see whether it is whole: `ignore_index` and `accept`. `partial` is
  // allow_incomplete; `rank` is `invalid_argument`, for files of all ranks are copied. A file is
  // not opened: there both are `invalid_argument`.
  OpenOptions open = {};
  // Files, or windows of a single file, that are copied at once. Each takes 8 MiB; on the way to S3
  // a file above 40 GB takes up to 1/5000 of its size besides.
  int threads = 4;
  bool read_back = false;  // reads each file again from the target: a difference is `corrupt`
  ProgressHook progress = {};
  std::stop_token stop = {};
};

// Something in a run's directory that a copy of the run leaves where it is.
struct PassedOver {
  std::string name;    // below the run
  std::string reason;  // "it has no marker: it is not finished", "it is no step", ...
};

struct CopyReport {
  std::uint64_t checkpoints = 0;
  std::uint64_t files = 0, bytes = 0;              // of checkpoints, and of their digests
  std::uint64_t whole_files = 0, whole_bytes = 0;  // among these: the target had them already
  std::uint64_t server_bytes = 0;  // of `bytes`: the store copied them, they did not come here
  std::vector<PassedOver> passed_over = {};  // of a run, by name
};

// Copies a checkpoint of any kind, a file or a directory, with its side file of digests, so that it
// stays sealed (in the side file of a file that gets another name, that is changed); or all
// committed checkpoints of a run (run_directory.h), the oldest first, and nothing else of it. A
// file goes to `to`, or under its own name into `to` if that is a directory or ends with a slash.
// Web servers list nothing: from them come files.
//
// A directory is copied by upload()'s protocol (below): data, then what a reader begins with,
// then the marker. So a copy that is interrupted, killed or stopped has no marker, and the next one
// goes on with whole files. A file is whole at the target if it was read there and has the source's
// digests or, where there are none, the same bytes; or if the store has it as a copy that it made
// itself of this version of the source. A source that is still being written has no marker and is
// `incomplete`, as is one whose files are not all there; one that is replaced meanwhile is
// `conflict`. Of a run the others are copied before the first error of a damaged one is thrown.
//
// All that is read is compared with the digests that there are. Inside one object store (the same
// server and credentials) the server copies data files of directories, and files; these bytes are
// checked only with `read_back`.
CopyReport copy(const Location& from, const Location& to, const CopyOptions& options = {});

// Copies a checkpoint's directory to another store, so that nobody ever takes a part of it for all.
// docs/design/checkpointers-run.md has the protocol.

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
  std::uint64_t whole_bytes = 0;   // of `bytes`, likewise
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

// A store with copies of some of its files on a disk that is nearer, which somebody else has made:
// OLMo's load takes such a directory. A cache that fills itself is in stores.h.

// The directory `of`, some of whose files are read from the directory `cache`; each is a path, a
// store, or with Location::name a directory in a store. What there is, the store says, and the
// cache is trusted with nothing. A copy is taken only if it has the size of the file there, and
//   - if digests of the file are recorded, each part that is read agrees with them;
//   - else if its last MiB equals that of the file, where archives of torch.save have the CRC-32s
//   of
//     all that is in them; and of a DCP checkpoint, if the cache's `.metadata` is the same, too.
// Otherwise, and from the moment that a read of the copy fails or does not agree, the file comes
// from the store. Digests are read once from the store: this is for one checkpoint, while it stays
// as it is.
//
// Nothing is ever written into the cache. Writes go to the store, and after the first one all reads
// do, too.
[[nodiscard]] std::shared_ptr<Store> cached_store(const Location& of, const Location& cache);

}  // namespace tessera
