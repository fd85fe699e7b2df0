// The checkpoints of one run: a directory with one checkpoint for each step that was saved, on disk
// or in a store. docs/design/checkpointers-run.md has the reasons.
//
//     RUN/step400            as the ranks shard it
//     RUN/step400-unsharded  whole
//     RUN/latest             OLMo's links to these; they are written and never followed
//     RUN/latest-unsharded
//
// A checkpoint counts from the moment that its marker is there: `.metadata` of a DCP checkpoint,
// `config.yaml` of an OLMo kind. A `run` is a path, a store, or with Location::name a directory of
// a store. Whoever writes to a run has it alone; others may read at the same time.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <stop_token>
#include <string>
#include <vector>

#include "tessera/comm.h"
#include "tessera/location.h"
#include "tessera/storage.h"

namespace [[gnu::visibility("default")]] tessera {

struct RunCheckpoint {
  std::int64_t step = 0;
  bool unsharded = false;
  Location where;  // for open, load, verify
};

// "step400", "step400-unsharded". A negative step is `invalid_argument`.
[[nodiscard]] std::string run_checkpoint_name(std::int64_t step, bool unsharded = false);
// A directory below: of a path, of a store's root, of a directory in a store.
[[nodiscard]] Location directory_in(const Location& where, const std::string& name);
// The place where a checkpoint of the run is or goes.
[[nodiscard]] RunCheckpoint run_checkpoint(const Location& run, std::int64_t step,
                                           bool unsharded = false);

// Those that have their marker, the newest first, the sharded one of a step before the unsharded
// one. None is opened, so any may be damaged. A run that is not there has none. A checkpoint that a
// kill left as NAME.old-<id> while it was being replaced is the one called NAME, unless that is
// there.
[[nodiscard]] std::vector<RunCheckpoint> run_checkpoints(const Location& run);

// How a checkpoint of a run is verified.
struct RunCheck {
  // false: the metadata is read, and names and sizes of all files are compared with the store; of a
  // file with digests its list of digests is, or its last block. true: verify() reads everything.
  bool read_data = false;
  int threads = 2;
  std::stop_token stop = {};
};

struct LatestCheckpoint {
  std::optional<RunCheckpoint> found;  // none: the run has no checkpoint yet
  std::vector<std::string> warnings;   // which newer ones are damaged, and how
};

// The newest checkpoint that is whole and not left behind (go_on_from). Others are passed over with
// a warning. When all are damaged that is `corrupt`, and when only those that were left are whole,
// `conflict`: the caller has to say which one is meant. A store that does not answer (`io`,
// `timeout`) says nothing about a checkpoint: that error is thrown, and nothing older takes its
// place.
[[nodiscard]] LatestCheckpoint latest_checkpoint(const Location& run, const RunCheck& check = {});
// The same for all ranks: rank 0 looks, and every rank gets its answer, with the place as its own
// `run` says. Where rank 0 does not see files of other ranks because nodes have disks of their own,
// each rank looks at its own files: a checkpoint is whole if all of them are, and the warning about
// another one names the rank and its host. Steps that rank 0 does not see count, too. Collective.
[[nodiscard]] LatestCheckpoint latest_checkpoint(const Location& run, const RunCheck& check,
                                                 Group& group);

// To be called when a training goes on from this step and saves into the run: checkpoints of later
// steps are of a line that it leaves. latest_checkpoint passes over them from now on, until their
// step is saved again. They are noted in the object `tessera-left.txt` of the run; a second call
// replaces what the first one has noted.
void go_on_from(const Location& run, std::int64_t step);
// The same by rank 0. Collective.
void go_on_from(const Location& run, std::int64_t step, Group& group);

// The numbers of newest checkpoints that stay in each of the three lists; negative: all of them.
// The new checkpoint is one of them, and it stays in any case.
struct Retention {
  std::int64_t sharded = -1;
  std::int64_t unsharded = -1;
  std::int64_t ephemeral = -1;
  // Which steps have sharded checkpoints that count as ephemeral ones. Empty: none.
  std::function<bool(std::int64_t step)> is_ephemeral = {};
  bool link = false;  // makes `latest` or `latest-unsharded` point to the new one; on disk only
  RunCheck check = {};
};

struct RetentionReport {
  std::vector<std::string> removed;  // names in the run
  std::vector<std::string> warnings;
};

// To be called after a save: verifies `saved`, and throws what is wrong with it before anything is
// removed. Then, of the steps before it, removes what the lists do not keep: older checkpoints,
// damaged ones beside them, and what killed saves left, unless its writer lives. A checkpoint's
// marker goes first, so at no moment does half of one look like a whole one. Later steps stay, with
// a warning unless go_on_from has noted them.
RetentionReport retain(const Location& run, const RunCheckpoint& saved,
                       const Retention& retention = {});
// The same by rank 0. Every rank gets its report. Where nodes have disks of their own, so that each
// has a part of `saved`, all ranks verify theirs first. One rank of each node then removes there
// what is not kept. A checkpoint of which one node lacks a part is a damaged one. Every rank gives
// the same `retention`. What fails on one node is the error of all. Collective.
RetentionReport retain(const Location& run, const RunCheckpoint& saved, const Retention& retention,
                       Group& group);

// Finds what killed writers left, and removes it on request.

struct GcOptions {
  bool remove = false;  // false: it is only listed
  // Younger ones may be of a writer that lives, and are not touched.
  std::chrono::seconds older_than = std::chrono::hours(24);
};

enum class LeftoverKind : std::uint8_t { file, directory, upload };

struct Leftover {
  LeftoverKind kind = LeftoverKind::file;
  std::string path;  // or URL
  std::uint64_t bytes = 0;
  // Since anything of it was written; none: the store does not say.
  std::optional<std::chrono::seconds> age = {};
  bool removed = false;
  std::string problem = {};  // why it could not be removed
};

struct GcReport {
  std::vector<Leftover> leftovers;  // by path
  std::uint64_t spared = 0;         // that are too young, or whose writer lives
};

// What killed saves, conversions and copies left in a directory and below it:
//   - unfinished files, ".NAME.tmp-ATTEMPT", and directories, "NAME-tmp-ATTEMPT", also beside it;
//     a directory of such a name that holds other things than checkpoints do is somebody else's;
//   - what waits for --resume, ".NAME.resume", and empty directories of steps;
//   - in DCP directories data files and side files that neither `.metadata`, nor the metadata of
//     ranks, nor the digests name or, where none of these is there, whose names are of an attempt
//     of ours; and probes. The checkpoint has to open without them, or nothing of the directory is
//     touched.
// What `.metadata` does not name counts from the time of that file on, because readers may still
// have the one before. On a disk, what a living writer has locked stays whatever its age. Stores
// have no locks, so there the age alone protects a writer, and on network file systems, where the
// lock of a directory does not reach other hosts: these keep what cannot be told unless
// `older_than` is an hour or more. A store that tells no times has only what `older_than` 0 covers.
//
// What cannot be removed is told in Leftover::problem, and does not keep the rest; so is a
// directory with leftovers whose checkpoint does not open. A place that is read only (hf, http) is
// `unsupported`.
GcReport gc(const Location& target, const GcOptions& options = {});

// Unfinished uploads of the object or directory of an object store, which no listing shows and
// which cost money: those of this library, by the mark that it puts into each, or by the names of
// DCP data files and probes. Another tool's are never touched. The age is that of the last part.
// The mark is sent beside the first parts. Of an upload that was killed before it arrived there is
// not more than these, and only a data file is known by its name. Where there are no uploads it is
// `unsupported`.
GcReport gc_uploads(const Location& target, const GcOptions& options = {});

}  // namespace tessera
