// Finds what killed writers left, and removes it on request.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/location.h"

namespace [[gnu::visibility("default")]] tessera {

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
//   - in DCP directories data files and side files that neither `.metadata`, nor the metadata of
//     ranks, nor the digests name or, where none of these is there, whose names are of an attempt
//     of ours; and probes. The checkpoint has to open without them, or nothing of the directory is
//     touched.
// What `.metadata` does not name counts from the time of that file on, because readers may still
// have the one before. Work that waits for --resume stays. On a disk, what a living writer has
// locked stays whatever its age. Stores have no locks, so there the age alone protects a writer,
// and on network file systems, where the lock of a directory does not reach other hosts: these keep
// what cannot be told unless `older_than` is an hour or more. A store that tells no times has only
// what `older_than` 0 covers.
//
// What cannot be removed is told in Leftover::problem, and does not keep the rest; so is a
// directory with leftovers whose checkpoint does not open.
GcReport gc(const Location& target, const GcOptions& options = {});

// Unfinished uploads of the object or directory of an object store, which no listing shows and
// which cost money: those of this library, by the mark that it puts into each, or by the names of
// DCP data files and probes. Another tool's are never touched. The age is that of the last part.
// The mark is sent beside the first parts. Of an upload that was killed before it arrived there is
// not more than these, and only a data file is known by its name. Where there are no uploads it is
// `unsupported`.
GcReport gc_uploads(const Location& target, const GcOptions& options = {});

}  // namespace tessera
