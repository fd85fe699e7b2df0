// Is a checkpoint whole and right? Verify it, seal it with digests, compare it with another one.
#pragma once

#include <cstdint>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/checkpoint.h"
#include "tessera/error.h"

namespace [[gnu::visibility("default")]] tessera {

struct Finding {
  ErrorCode code;
  std::string text;
};

struct VerifyReport {
  std::vector<Finding> findings;  // empty: all is well
  std::uint64_t tensors = 0;
  std::uint64_t bytes = 0;            // checked by a checksum
  std::uint64_t bytes_unchecked = 0;  // no checksum in the format
};

struct VerifyOptions {
  bool read_data = true;  // false: only what the metadata can prove
  int threads = 2;        // 1 to 1024, as everywhere
  ProgressHook progress = {};
  std::stop_token stop = {};  // ends the work with `cancelled`
};

// Checks structure, coverage, sizes, and every checksum there is: all bytes of files with digests,
// and the CRC-32s of other files. Where a save has left digests of the state (state_digests.h), all
// tensors are read once more and compared with them: one that differs, or that one side alone has,
// is a finding. A checkpoint that cannot be opened is a finding, not an exception.
[[nodiscard]] VerifyReport verify(const Location& where, const VerifyOptions& options = {});
// The same for a checkpoint that is open, which may be a part of one: without digests of the state.
[[nodiscard]] VerifyReport verify(const Checkpoint& checkpoint, const VerifyOptions& options = {});

struct SealOptions {
  int threads = 2;  // 1 to 1024
  ProgressHook progress = {};
  std::stop_token stop = {};  // ends the work with `cancelled`; nothing is written then
};

struct SealReport {
  bool was_sealed = false;  // all files had digests already, and nothing was written
  std::string side_file;    // its path; empty: the digests are inside the file
  std::uint64_t files = 0;  // with digests
  std::uint64_t bytes = 0;  // of these files
};

// Adds digests to a checkpoint that somebody else wrote, in a side file: in its directory, or
// beside a single file (docs/formats/side-file.md). From then on every read of it is checked. It
// verifies the checkpoint first and throws the first finding, so it never seals damage. A second
// call only verifies.
SealReport seal(const std::string& path, const SealOptions& options = {});

struct Difference {
  enum class Kind : std::uint8_t { missing, extra, shape, dtype, value, type };
  Kind kind;
  std::string name;
  std::string text;  // both sides; for values: largest difference and first index
};
[[nodiscard]] std::string_view to_string(Difference::Kind kind) noexcept;

// Compares by name, across kinds: `missing` is only in `a`, `extra` only in `b`. Tensors are
// compared bit for bit. If both checkpoints have types, the types of dicts, of their keys and of
// tensors (parameters, requires_grad) are compared too; a difference is one `type` per container.
[[nodiscard]] std::vector<Difference> diff(const Checkpoint& a, const Checkpoint& b,
                                           const ProgressHook& progress = {});

}  // namespace tessera
