// Which rank copies which file of an upload.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/read/side_file.h"
#include "comm/message.h"
#include "tessera/storage.h"
#include "tessera/upload.h"

namespace tessera {

struct UploadFile {
  ObjectInfo object;
  int rank = 0;  // that copies it
  std::optional<FileDigests> digests = {};
};
using UploadPlan = std::vector<UploadFile>;  // data first, markers last

// What ranks see, in a conference: each begins with its own files, and two lists are joined by
// name. Throws `conflict` if sizes differ.
[[nodiscard]] Bytes encode_seen(const std::vector<ObjectInfo>& files, int rank);
[[nodiscard]] Bytes join_seen(ByteView left, ByteView right);
// What rank 0 knows of the files.
struct KnownFiles {
  std::set<std::string> leftovers;  // these are not copied
  DigestsByName digests;
};
// Shares out what all ranks together see. Files that all of them see go to the ranks so that each
// gets about as many bytes; of others each goes to one of those that see it. Markers are rank 0's.
[[nodiscard]] UploadPlan share_out(ByteView seen, const KnownFiles& known, int ranks);

[[nodiscard]] Bytes encode_plan(const UploadPlan& plan);
[[nodiscard]] UploadPlan decode_plan(ByteView bytes);

[[nodiscard]] std::uint64_t bytes_of(const UploadPlan& plan);

// Uploads of kinds that have no marker.

// upload() by one process of a directory whose kind has no marker: a set of safetensors files, or
// files of ranks. What a reader begins with comes after the rest. Without `overwrite` a file of
// another content is `already_exists`.
UploadReport upload_unmarked(const Location& from, const Location& to,
                             const UploadOptions& options);

}  // namespace tessera
