// Which rank copies which file of an upload.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/read/side_file.h"
#include "comm/message.h"
#include "tessera/copy.h"
#include "tessera/storage.h"

namespace tessera {

struct UploadFile {
  ObjectInfo object;
  int rank = 0;  // that copies it
  std::optional<FileDigests> digests = {};
};
auto fields(FieldsOf<FileDigests> auto& digests) {
  return std::tie(digests.size, digests.blocks, digests.origin, digests.tail);
}
auto fields(FieldsOf<UploadFile> auto& file) {
  return std::tie(file.object.name, file.object.size, file.rank, file.digests);
}
using UploadPlan = std::vector<UploadFile>;  // data first, markers last

// What rank 0 knows of the files.
struct KnownFiles {
  std::set<std::string> leftovers;  // these are not copied
  DigestsByName digests;
};

[[nodiscard]] std::uint64_t bytes_of(const UploadPlan& plan);

// Uploads of kinds that have no marker.

// upload() by one process of a directory whose kind has no marker: a set of safetensors files, or
// files of ranks. What a reader begins with comes after the rest. Without `overwrite` a file of
// another content is `already_exists`.
UploadReport upload_unmarked(const Location& from, const Location& to,
                             const UploadOptions& options);

}  // namespace tessera
