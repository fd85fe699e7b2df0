// Is a checkpoint whole and right? Verify it, seal it with digests, compare it with another one.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/checkpoint.h"
#include "tessera/comm.h"
#include "tessera/error.h"
#include "tessera/load_options.h"
#include "tessera/storage.h"
#include "tessera/value.h"

namespace [[gnu::visibility("default")]] tessera {

struct Finding {
  ErrorCode code;
  std::string text;  // all of `error`, as its what()
  Error error;
  explicit Finding(Error what) : code(what.code()), text(what.what()), error(std::move(what)) {}
};

// What bytes are compared with.
enum class CheckedBy : std::uint8_t {
  digests,   // of blocks of a file, which Tessera has recorded
  crc32,     // of a record, in the archive
  sha256,    // of the file: how the Hugging Face Hub names large ones
  git_sha1,  // of the file as git has it: how the Hub names all others
  nothing,   // no checksum in the format, and no name that tells one
};
[[nodiscard]] std::string_view to_string(CheckedBy by) noexcept;  // "sha256"

struct CheckedBytes {
  std::string file;  // its path or URL, or "memory"
  CheckedBy by = CheckedBy::nothing;
  std::uint64_t bytes = 0;
};

struct VerifyReport {
  std::vector<Finding> findings;  // empty: all is well
  std::uint64_t tensors = 0;
  std::uint64_t inner_tensors = 0;    // besides, inside of tuples, objects and other tensors
  std::uint64_t bytes = 0;            // checked by a checksum
  std::uint64_t bytes_unchecked = 0;  // no checksum in the format
  std::vector<CheckedBytes> files;    // both, by file and by what they were compared with
  // The reason why nobody can say whether all is well: nothing is wrong but what could not be read
  // for want of rights, descriptors or an answer, or there is no checkpoint. Null: it can be said.
  [[nodiscard]] const Error* obstacle() const noexcept;
};

struct VerifyOptions {
  bool read_data = true;  // false: only what the metadata can prove
  OpenOptions open = {};  // `partial`: files that are missing are no finding
  int threads = 2;        // 1 to 1024, as everywhere
  ProgressHook progress = {};
  std::stop_token stop = {};  // ends the work with `cancelled`
};

// Checks structure, coverage, sizes, and every checksum there is: all bytes of files with digests,
// all bytes of files that the Hugging Face Hub names by their content (in its cache, on the Hub,
// and where a download has left records of it), and the CRC-32s of other files. Where a save has
// left digests of the state (below), all tensors are read once more and compared with them: one
// that differs, or that one side alone has, is a finding. A checkpoint that cannot be opened is a
// finding, not an exception.
[[nodiscard]] VerifyReport verify(const Location& where, const VerifyOptions& options = {});
// The same for a checkpoint that is open, which may be a part of one: without digests of the state.
[[nodiscard]] VerifyReport verify(const Checkpoint& checkpoint, const VerifyOptions& options = {});

struct SealOptions {
  // `ignore_index` and `accept`. The others are `invalid_argument`: digests tell later of each file
  // that is missing, so they are of all files, and those of all ranks stand in one side file.
  OpenOptions open = {};
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
  std::string text;  // both sides; for elements of tensors their number, the first, the largest
  // Of `value`, where tensors of one shape and dtype have different elements.
  struct Elements {
    std::int64_t different = 0;
    std::int64_t all = 0;
    Shape first;                        // the index of the first one that differs
    std::optional<Value> largest = {};  // difference, an integer or a real; none for other dtypes
  };
  std::optional<Elements> elements = {};
  // Of `shape`, where two tensors of one dtype differ in their first dimension alone, as with a
  // vocabulary that was padded.
  struct Rows {
    std::int64_t common = 0;      // that both have
    std::int64_t different = 0;   // elements of these
    bool is_zero_behind = false;  // whether the longer one has nothing but zero bits behind them
  };
  std::optional<Rows> rows = {};
};
[[nodiscard]] std::string_view to_string(Difference::Kind kind) noexcept;

// Compares by name, across kinds: `missing` is only in `a`, `extra` only in `b`. Tensors are
// compared bit for bit, and so are arrays of numpy, whose order of bytes and of dimensions does not
// count. Values of known classes (docs/formats/torch-save.md) are equal if they mean the same,
// however they were pickled. If both checkpoints have types, the types of dicts, of their keys and
// of tensors (parameters, requires_grad) are compared too; a difference is one `type` per
// container. Throws `incomplete` where leaves lie in missing files.
[[nodiscard]] std::vector<Difference> diff(const Checkpoint& a, const Checkpoint& b,
                                           const ProgressHook& progress = {});

// Digests of a training state that are the same on every number of ranks and in every layout.
//
// A load that brings elements to wrong places shows here, and not only in the loss.

// The CRC-32 of each tensor's bytes in row-major order, by name. torch.save records it, too.
using StateDigests = std::map<std::string, std::uint32_t>;

// What a load has brought into memory, summed while it was in the cache. Of tensors all of whose
// elements came so on this rank, state_digests() does not read the memory again. Whoever changes
// them in between gets the digests of before.
class LoadedSums {
 public:
  LoadedSums();
  ~LoadedSums();
  LoadedSums(const LoadedSums&) = delete;
  LoadedSums& operator=(const LoadedSums&) = delete;

  // For LoadOptions::filled of one load; the sums outlive it.
  [[nodiscard]] FilledHook hook();

 private:
  friend StateDigests state_digests(const Value& tree, Group& group, int threads,
                                    const LoadedSums* loaded);
  struct Sums;
  std::unique_ptr<Sums> sums_;
};

// The digests of all tensors in the dicts and lists of `tree`, of which each rank holds its own
// pieces, as in save() of checkpoint.h; on every rank. Ranks digest what they hold, and nothing
// else travels. Throws `mismatch` naming the first tensor that differs between ranks that hold the
// same part of it, `unsupported` for a tensor of which ranks cannot compute what the others hold.
// `threads`: of this rank, 1 to 256. `loaded`: of a load into this tree's memory, under the names
// that it has here. Collective.
[[nodiscard]] StateDigests state_digests(const Value& tree, Group& group, int threads = 1,
                                         const LoadedSums* loaded = nullptr);

// What a save of an OLMo kind left about its tensors in the checkpoint; empty: it has none. Throws
// `corrupt` for a file that is damaged.
[[nodiscard]] StateDigests saved_digests(const Store& checkpoint);

// What the pickles of a file or checkpoint would import and call in Python, without building or
// running anything.

enum class NameKind : std::uint8_t {
  vetted,     // was looked at: used like this it does nothing but build data
  allowed,    // by ScanOptions::allow
  unknown,    // nobody has looked at it, or at this use of it: it may run code
  dangerous,  // runs code, opens files or reaches the system
};
[[nodiscard]] std::string_view to_string(NameKind kind) noexcept;

struct ScannedName {
  std::string name;  // "module.name", as Python 3 has it
  NameKind kind = NameKind::unknown;
  std::uint64_t pickles = 0;  // that mention it
  std::string first;  // the first of them (of this kind): a file, and the record or item in it
  std::string how;    // why a name that is vetted otherwise is not here: how it is used
};

struct ScanReport {
  std::vector<ScannedName> names;  // the most dangerous ones first, then by name
  std::uint64_t pickles = 0;
  // What could not be scanned to its end, and what Python may read and Tessera does not: damage,
  // archives of other kinds, compressed files, directories that are links or may not be read.
  std::vector<Finding> problems;

  // Nothing unknown, nothing dangerous, and no problem.
  [[nodiscard]] bool clean() const;
};

struct ScanOptions {
  // Names ("module.name") or globs of a project's own classes, which count as `allowed` and not as
  // `unknown`. Dangerous names stay what they are.
  std::vector<std::string> allow;
  std::stop_token stop;
};

// Every pickle of a file (an archive of torch.save, its stream before 1.6, bare pickles one after
// another, numpy's arrays of objects; those in any of these, and those that calls such as
// `pickle.loads` get) or of a directory: its `.metadata` (or those of the ranks) and each item that
// they name, and every other file that begins as a pickle, an archive or text that Python could
// unpickle; in a safetensors file the archives of its entry tessera.tree. What opens files is what
// reads here. Throws `not_found`, and `cancelled` when `options.stop` is requested. What is
// promised and what is not: SECURITY.md.
[[nodiscard]] ScanReport scan(const std::string& path, const ScanOptions& options = {});

}  // namespace tessera
