// Which rank copies which file of an upload.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/digests/side_file.h"
#include "comm/message.h"
#include "tessera/storage.h"

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

}  // namespace tessera
