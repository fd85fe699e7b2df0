// Copies checkpoints byte for byte between any two places: disks, object stores, from web servers.
#pragma once

#include <cstdint>
#include <stop_token>

#include "tessera/job.h"
#include "tessera/location.h"

namespace [[gnu::visibility("default")]] tessera {

struct CopyOptions {
  // false: another checkpoint at the target is `already_exists`. What an interrupted copy of the
  // same source left does not count, nor does a copy that is whole.
  bool overwrite = false;
  bool single_writer = false;     // as SaveOptions has it
  bool allow_incomplete = false;  // copies also a directory that no reader would take as whole
  // Files, or windows of a single file, that are copied at once. Each takes 8 MiB; on the way to S3
  // a file above 40 GB takes up to 1/5000 of its size besides.
  int threads = 4;
  bool read_back = false;  // reads each file again from the target: a difference is `corrupt`
  ProgressHook progress = {};
  std::stop_token stop = {};
};

struct CopyReport {
  std::uint64_t checkpoints = 0;
  std::uint64_t files = 0, bytes = 0;              // of these, and of their digests
  std::uint64_t whole_files = 0, whole_bytes = 0;  // of them: the target had them already
  std::uint64_t server_bytes = 0;  // of `bytes`: the store copied them, they did not come here
};

// Copies a checkpoint of any kind, a file or a directory, with its side file of digests, so that it
// stays sealed (in the side file of a file that gets another name, that is changed); or all
// committed checkpoints of a run (run_directory.h), the oldest first. A file goes to `to`, or under
// its own name into `to` if that is a directory or ends with a slash. Web servers list nothing:
// from them come files.
//
// A directory is copied by upload()'s protocol (upload.h): data, then what a reader begins with,
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

}  // namespace tessera
