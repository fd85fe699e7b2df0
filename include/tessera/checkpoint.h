// Checkpoints: open any kind, save and load a state tree by N ranks, convert, verify, compare.
//
// A checkpoint is a tree of values whose tensor leaves say which piece of which tensor lives where;
// everything here is redistribution from one set of pieces to another.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <vector>

#include "tessera/comm.h"
#include "tessera/storage.h"
#include "tessera/leaf.h"
#include "tessera/value.h"

namespace tessera {

// The OLMo kinds are directories (docs/formats/olmo.md) whose leaves are named alike: "model.NAME",
// "optim.state.NAME.KEY", "optim.param_groups...", "train.KEY".
enum class CheckpointKind : std::uint8_t {
  dcp,
  torch_file,
  safetensors,
  olmo_full,
  olmo_torch_new,
  olmo_legacy,  // rank{r}.pt: sharded state dicts with "model"
  olmo_local,   // {model,optim,train}/rank{r}.pt: flat parameters
  rank_files,   // other files of one rank each: model_world_size_N_rank_R.pt, bare rank{r}.pt
};
[[nodiscard]] std::string_view to_string(CheckpointKind kind) noexcept;

// An opened checkpoint: metadata is in memory, tensor bytes stay where they are.
struct Checkpoint {
  CheckpointKind kind = CheckpointKind::dcp;
  std::string path;
  std::vector<Leaf> leaves;  // in the checkpoint's own order; tensors with pieces that cover them
  std::vector<ObjectInfo> files;  // the objects that belong to it
  std::string producer;           // what the files say of their origin; may be empty
  std::string save_id;            // DCP: names this save; empty elsewhere or in old files
  int world_size = 0;             // ranks whose files are there; 0: not known
  // Whether the types of dicts and keys and what is a parameter are known: files of torch.save say
  // it, and what Tessera wrote. Elsewhere every dict is a plain one, every key a string.
  bool has_types = false;
  std::vector<std::string> warnings;  // what a careful reader should know (a stale side file, ...)
  // What safetensors files say in `__metadata__`, where several differ the first one's; without
  // what is about the files themselves.
  std::map<std::string, std::string> metadata;
  [[nodiscard]] const Leaf* find(std::string_view name) const;  // null: absent
  // What `leaves` are, as nested containers: the file's own tree where it holds one, as long as no
  // leaf was taken away or replaced, otherwise unflatten(leaves), with what that throws. A tree of
  // its own: the checkpoint stays as it is when it is changed.
  [[nodiscard]] Value tree() const;

  std::shared_ptr<Store> store;  // where `files` are
  std::optional<Value> root;     // the tree, where the file holds one rather than names
};

struct OpenOptions {
  // A longer safetensors header is `limit`; the reference library's own cap.
  std::uint64_t header_limit = 100'000'000;  // bytes
};

// Detects the kind of a file or directory and reads its metadata. Proves that the pieces of every
// tensor cover it exactly once (P-14) and that every file they name is there and long enough.
// Throws `not_found` (no such path; a directory without a checkpoint in it), `corrupt`,
// `incomplete`; docs/hostile-cases.md has every case.
[[nodiscard]] Checkpoint open_checkpoint(const std::string& path, const OpenOptions& options = {});
// The same for a store whose root is a checkpoint directory.
[[nodiscard]] Checkpoint open_checkpoint(std::shared_ptr<Store> store,
                                         const OpenOptions& options = {});

// Progress of long work: called by working threads, one call at a time, about ten times a second,
// and by the caller's own thread when all is done. Of a job of several ranks each rank hears of its
// own part. What the hook throws ends the work.
struct Progress {
  std::uint64_t done = 0;   // bytes of tensors
  std::uint64_t total = 0;  // bytes; 0: not known yet
};
using ProgressHook = std::function<void(const Progress&)>;

// Each of save, load, load_all and convert has a token in its options that ends it, from any
// thread: it throws `cancelled` within a second, and the time that the store takes for what is
// under way. On several ranks one rank's token is enough: all of them throw. Nothing has been made
// visible then, and what a load was to fill has undefined content. After the step that makes the
// result visible a request has no effect any more.

// Every `threads` is from 1 to 1024, everything else is `invalid_argument`.

struct IoReport {
  std::uint64_t bytes_needed = 0;     // of the elements that were asked for
  std::uint64_t bytes_read = 0;       // from the store, metadata apart
  std::uint64_t bytes_unchecked = 0;  // read without a checksum over them
  std::uint64_t bytes_written = 0;
};

// Saving ------------------------------------------------------------------------------------------

struct SaveOptions {
  bool overwrite = false;  // an existing checkpoint is `already_exists` otherwise
  int threads = 2;         // writing threads a rank
  // Ranks that hold one chunk with different values: `mismatch`, nothing saved; else a warning.
  bool require_equal_copies = false;
  ProgressHook progress;
  std::stop_token stop = {};
};

// Saves `tree` as a PyTorch distributed checkpoint in `directory`. Collective over `group`. Each
// rank gives its own tree of the same structure: tensor leaves carry the rank's own pieces (in
// memory), `sharded` ones as chunks (boxes), others whole and the same on every rank. Replicas are
// written once, by the rank with the least to write (P-13), and compared: by their bytes up to
// 64 KiB, above that by 64 KiB spread over them; as rank 0's options say, other values than the
// writer's are a warning or `mismatch` with the key and the ranks, nothing saved. Every piece is
// proved to lie in its storage, and the tree to contain itself nowhere, before anything is read:
// `invalid_argument` with the key and both numbers. Pieces without a storage are other ranks'. All
// ranks see the failure of any (P-03); until the commit, an older checkpoint in `directory` stays
// whole (docs/design/commit.md).
IoReport save(const Value& tree, const std::string& directory, Group& group,
              const SaveOptions& options = {});

// Loading -----------------------------------------------------------------------------------------

struct LoadOptions {
  // Keys of `tree` that the checkpoint lacks are left alone and reported (P-16).
  bool allow_missing = false;
  bool allow_cast = true;  // dtypes may differ; elements are converted (P-16)
  // With allow_cast: also into integer types that do not hold every value (docs/design/casts.md).
  bool allow_wrap = false;
  int threads = 2;  // reading threads a rank
  ProgressHook progress;
  std::stop_token stop = {};
};

struct LoadReport : IoReport {
  std::vector<std::string> missing;  // keys of `tree` that the checkpoint lacks, sorted
};

// Loads from the checkpoint at `path`, of any kind, into `tree`: tensor leaves in place, into the
// memory of their pieces; other leaves are replaced by the checkpoint's values, where these are or
// hold tensors in fresh memory that the tree owns. Extra keys of the checkpoint are ignored.
// Collective over `group`; each rank asks for its own pieces, and any layout is served from any
// other (P-17).
//
// Before any memory is written it throws
//   `not_found`         a missing key; `path` itself
//   `mismatch`          another shape; a value for a tensor; another dtype without allow_cast,
//                       or one that needs allow_wrap
//   `unsupported`       dtypes between which there is no conversion
//   `invalid_argument`  a tree that contains itself; a piece that is not inside its tensor or its
//                       storage, with both numbers, or of which several elements have one place;
//                       two keys whose memory overlaps.
// One tensor may have two keys (tied weights). The memory is filled once and compared with what the
// checkpoint has for the other key: a difference is `mismatch`. A failure after the beginning
// leaves the pieces with undefined content.
LoadReport load(Value& tree, const std::string& path, Group& group,
                const LoadOptions& options = {});

// checkpoint.tree() with every tensor, also inside of tuples and objects, in fresh memory owned by
// the tree. Every checksum of the tensors' bytes is checked.
[[nodiscard]] Value load_all(const Checkpoint& checkpoint, const LoadOptions& options = {});

// Converting --------------------------------------------------------------------------------------

// How the OLMo kinds are laid out.
struct OlmoOptions {
  // olmo_local: a module whose whole path matches (ECMAScript) has a flat parameter of its own; the
  // root has what remains. Empty: one a block, "(.*\.)?blocks\.[0-9]+"; from a source of this
  // kind, the units that it has.
  std::string unit;
  // olmo_local: FSDP's use_orig_params. Unset: as the source, else yes, which is what OLMo does.
  std::optional<bool> orig_params;
  bool safetensors = false;  // olmo_full: model and optim as safetensors with OLMo's names
  bool model_only = false;   // olmo_full: no optimizer, no trainer state
  std::string config;        // a config.yaml to copy; empty: the source's, if it has one
};

struct ConvertOptions {
  CheckpointKind to = CheckpointKind::safetensors;
  // dcp, olmo_torch_new, olmo_legacy, olmo_local: how many share the target, 1 to 2^20.
  int ranks = 1;
  OlmoOptions olmo;
  bool overwrite = false;  // replaces an existing target atomically
  // Goes on where an earlier conversion with this option, the same source and the same options was
  // interrupted, and leaves its own work to a later one when it is (docs/design/resume.md): in
  // ".NAME.resume" beside the target, for dcp in ".resume" inside it. Nothing that was left is used
  // before its bytes were read and compared. What another conversion left there is removed; while
  // one works there, it is `conflict`.
  bool resume = false;
  int threads = 2;
  std::uint64_t memory = 64u << 20;  // bytes for all buffers together
  std::vector<std::string> only;     // "model", "optim", globs over names; empty: everything
  std::vector<std::string> rename;   // rules "RE=>TO" over names; two that become one: `conflict`
  // Of all floating tensors of 16 bits and more; rounded to nearest, ties to even. float8, float4
  // and complex types are `unsupported` here. Integer types cut fractions off and wrap what does
  // not fit: without `allow_wrap` they are `invalid_argument` (docs/design/casts.md).
  std::optional<DType> dtype;
  bool allow_wrap = false;
  // Safetensors: tensors of more bytes together go into several files and an index, as huggingface
  // does it; the target is a directory then, and appears whole. 0: one file. A tensor is never
  // divided.
  std::uint64_t max_shard_size = 0;
  // Quantized weights (docs/formats/safetensors.md) are written as this floating type, without
  // their scales; `only` and `rename` see the names that come out. Unset: they are copied as they
  // are.
  std::optional<DType> dequantize;
  OpenOptions open;
  ProgressHook progress;
  // With `resume` what is done so far stays for a later run, without it nothing.
  std::stop_token stop = {};
};

struct ConvertReport {
  IoReport io;
  std::string target;  // what was written: the file, or the directory of a kind that is one
  std::uint64_t tensors = 0;
  std::uint64_t values_in_metadata = 0;  // non-tensors that travel as tagged JSON (docs/formats)
  std::uint64_t bytes_resumed = 0;  // of the target, made by an interrupted run and found right
  std::vector<std::string> notes;   // what the caller should hear of: no config.yaml, ...
};

// Streams the checkpoint at `source` into `target` in bounded memory. Every byte of the source is
// read and its checksum checked. `target` appears complete or not at all; when it does not, nothing
// else is left either, directories that were made for it included (docs/design/commit.md has what a
// killed process may leave). Throws `conflict` while another process converts into the same
// directory of DCP.
ConvertReport convert(const std::string& source, const std::string& target,
                      const ConvertOptions& options = {});

// Checking ----------------------------------------------------------------------------------------

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

// Structure, coverage, sizes, and every checksum there is: all bytes of files with digests, the
// CRC-32s of others. With `read_data` false only what the metadata can prove. A checkpoint that
// cannot be opened is a finding, not an exception.
[[nodiscard]] VerifyReport verify(const std::string& path, bool read_data = true, int threads = 2,
                                  const ProgressHook& progress = {});
// The same for a checkpoint that is open.
[[nodiscard]] VerifyReport verify(const Checkpoint& checkpoint, bool read_data = true,
                                  int threads = 2, const ProgressHook& progress = {});

struct SealReport {
  bool was_sealed = false;  // all files had digests already: nothing was written
  std::string side_file;    // its path; empty: the digests are inside the file
  std::uint64_t files = 0;  // with digests
  std::uint64_t bytes = 0;  // of these files
};

// Adds digests to a checkpoint that somebody else wrote: a side file in its directory, or beside a
// single file (docs/formats/side-file.md). From then on every read of it is checked. Verifies it
// first and throws the first finding: damage is not sealed. A second time only verifies.
SealReport seal(const std::string& path, int threads = 2, const ProgressHook& progress = {});

struct Difference {
  enum class Kind : std::uint8_t { missing, extra, shape, dtype, value, type };
  Kind kind;
  std::string name;
  std::string text;  // both sides; for values: largest difference and first index
};
[[nodiscard]] std::string_view to_string(Difference::Kind kind) noexcept;

// Compares by name, across kinds: `missing` is in `a` only, `extra` in `b` only. Tensors are
// compared bit for bit. Where both have types, those of dicts, of their keys and of tensors
// (parameters, requires_grad) are compared too: `type`, once a container.
[[nodiscard]] std::vector<Difference> diff(const Checkpoint& a, const Checkpoint& b,
                                           const ProgressHook& progress = {});

}  // namespace tessera
