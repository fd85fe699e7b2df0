// Files that the Hugging Face Hub names by what is in them: large ones by SHA-256, others as git
// does.
#pragma once

#include <cstdint>
#include <memory>
#include <stop_token>
#include <string>
#include <vector>

#include "tessera/checkpoint.h"
#include "tessera/verify.h"

namespace tessera {

struct NamedFile {
  std::shared_ptr<const ByteSource> source;
  std::string digest;    // lower-case hex digits
  std::string named_by;  // who says so, for errors: a path

  [[nodiscard]] CheckedBy by() const;
};

// Those of the checkpoint's files whose digest is known:
//   on the Hub                 (hf://) by its listing
//   in its cache               NAME/snapshots/REVISION/FILE is a link to NAME/blobs/DIGEST, or the
//                              file is the blob itself
//   in a directory (local_dir) that a download has filled: the second line of
//                              .cache/huggingface/download/FILE.metadata
// A record that is no digest tells nothing.
[[nodiscard]] std::vector<NamedFile> named_files(const Checkpoint& checkpoint);

// Reads all of the file, and returns how much that is. Throws `corrupt` if its digest is another
// one, and `cancelled` when `stop` is requested.
std::uint64_t require_name(const NamedFile& file, const std::stop_token& stop);

}  // namespace tessera
