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
#include "tessera/leaf.h"
#include "tessera/storage.h"
#include "tessera/tensor_view.h"
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

struct OpenOptions {
  // A longer safetensors header is `limit`; the reference library's own cap.
  std::uint64_t header_limit = 100'000'000;  // bytes
};

// Progress of long work: called by working threads, one call at a time, about ten times a second,
// and by the caller's own thread when all is done. Of a job of several ranks each rank hears of its
// own part. What the hook throws ends the work.
struct Progress {
  std::uint64_t done = 0;   // bytes of tensors
  std::uint64_t total = 0;  // bytes; 0: not known yet
};
using ProgressHook = std::function<void(const Progress&)>;

// `stop` in the options of a job ends it, from any thread: it throws `cancelled` within a second,
// and the time that the store takes for what is under way. On several ranks one rank's token is
// enough: all of them throw. Nothing has been made visible then, and what a read or a load was to
// fill has undefined content. After the step that makes the result visible a request has no effect
// any more.

// Every `threads` is from 1 to 1024, everything else is `invalid_argument`.

struct IoReport {
  std::uint64_t bytes_needed = 0;     // of the elements that were asked for
  std::uint64_t bytes_read = 0;       // from the store, metadata apart
  std::uint64_t bytes_unchecked = 0;  // read without a checksum over them
  std::uint64_t bytes_written = 0;
};

struct ReadOptions {
  bool allow_cast = true;  // dtypes may differ; elements are converted
  // With allow_cast: also into integer types that do not hold every value (docs/design/casts.md).
  bool allow_wrap = false;
  int threads = 2;                   // no more than there are requests are used
  std::uint64_t memory = 64u << 20;  // bytes for all buffers together
  ProgressHook progress = {};
  std::stop_token stop = {};
};

// What goes where in a read.
struct ReadRequest {
  std::string name;                 // of a tensor
  TensorView to;                    // shaped like `slice`; a flat range is one dimension
  std::optional<Slice> slice = {};  // none: the whole tensor
};

struct LoadOptions {
  // Keys of `tree` that the checkpoint lacks are left alone and reported.
  bool allow_missing = false;
  bool allow_cast = true;   // dtypes may differ; elements are converted
  bool allow_wrap = false;  // as in ReadOptions
  int threads = 2;          // reading threads a rank
  ProgressHook progress = {};
  std::stop_token stop = {};
};

// An opened checkpoint: metadata is in memory, tensor bytes stay where they are. All members may be
// called from several threads at once.
struct Checkpoint {
  // Detects the kind of a file, a directory or a store and reads its metadata, once. Proves that
  // the pieces of every tensor cover it exactly once and that every file they name is there
  // and long enough. Throws `not_found` (no such path; a directory without a checkpoint in it),
  // `corrupt`, `incomplete`; docs/hostile-cases.md has every case.
  [[nodiscard]] static Checkpoint open(const Location& where, const OpenOptions& options = {});

  // Names of tensors that match the glob ('*', '?', '[a-z]'; '*' matches dots, too), sorted.
  [[nodiscard]] std::vector<std::string> names(const std::string& glob = "*") const;
  // A tensor's dtype, shape and pieces. Throws `not_found`, and `mismatch` for a value that is
  // none.
  [[nodiscard]] const Tensor& tensor(std::string_view name) const&;
  const Tensor& tensor(std::string_view name) const&& = delete;

  // Fills memory with a tensor or a slice of one, of any layout; no other bytes are read than the
  // slice needs. Before anything is written it throws
  //   `not_found`         no such name
  //   `mismatch`          `to` has another shape than the slice; another dtype without allow_cast,
  //                       or one that needs allow_wrap
  //   `unsupported`       dtypes between which there is no conversion
  //   `invalid_argument`  a slice outside of the tensor; a view with several elements at one place;
  //                       two requests whose memory overlaps.
  // A part of a tensor is compared with digests where the files have them (what Tessera wrote or
  // sealed); `bytes_unchecked` counts the rest.
  IoReport read(std::string_view name, const TensorView& to, const ReadOptions& options = {}) const;
  IoReport read(std::string_view name, const Slice& slice, const TensorView& to,
                const ReadOptions& options = {}) const;
  IoReport read_many(const std::vector<ReadRequest>& requests,
                     const ReadOptions& options = {}) const;

  // tree() with every tensor, also inside of tuples and objects, in fresh memory that it owns.
  // Every checksum of the tensors' bytes is checked.
  [[nodiscard]] Value load(const LoadOptions& options = {}) const;
  // What `leaves` are, as nested containers: the file's own tree where it holds one, as long as no
  // leaf was taken away or replaced, otherwise unflatten(leaves), with what that throws. A tree of
  // its own: the checkpoint stays as it is when it is changed.
  [[nodiscard]] Value tree() const;
  [[nodiscard]] const Leaf* find(std::string_view name) const;  // tensor or value; null: absent

  // The checkpoint with other leaves, to be read, loaded or converted as this one; no tensor is
  // read for that. `fn` gets each leaf, in order, and gives what stands for it: the same, with
  // another `name` or `value` (as of computed_tensor in convert.h), or none: it is left out. Throws
  // `conflict` when two get one name.
  using LeafFunction = std::function<std::optional<Leaf>(Leaf leaf)>;
  [[nodiscard]] Checkpoint map(const LeafFunction& fn) const;

  CheckpointKind kind = CheckpointKind::dcp;
  std::string path;
  // In the checkpoint's own order; tensors with pieces that cover them. Some may be taken away, but
  // names and order stay: `find` looks them up.
  std::vector<Leaf> leaves;
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
  bool mapped = false;           // map() gave it
  std::shared_ptr<Store> store;  // where `files` are; null: it is in memory
  std::optional<Value> root;     // the tree, where the file holds one rather than names

 private:
  void index_names();
  std::vector<std::uint32_t> by_name_;  // positions in `leaves`; another size: they were changed
};

// Saving ------------------------------------------------------------------------------------------

struct SaveOptions {
  // dcp, torch_file or safetensors. Unset: what the path's or object's extension says (.pt, .pth,
  // .safetensors), else dcp.
  std::optional<CheckpointKind> kind = {};
  bool overwrite = false;  // an existing checkpoint is `already_exists` otherwise
  int threads = 2;         // writing threads a rank
  // Ranks that hold one chunk with different values: `mismatch`, nothing saved; else a warning.
  bool require_equal_copies = false;
  ProgressHook progress = {};
  std::stop_token stop = {};
};

// Saves `tree`: as a PyTorch distributed checkpoint into a directory or a store, or as one file.
//
// A file of torch.save or safetensors is of one process, whose tree holds every tensor whole: a
// group of more ranks is `unsupported`, a tensor with a part missing `incomplete`. It appears
// complete or not at all.
//
// A DCP checkpoint is of all ranks of the group. Collective over `group`. Each rank gives its own
// tree of the same structure: tensor leaves carry the rank's own pieces (in memory), `sharded` ones
// as chunks (boxes), others whole and the same on every rank. Replicas are written once, by the
// rank with the least to write, and compared: by their bytes up to 64 KiB, above that by 64
// KiB spread over them; as rank 0's options say, other values than the writer's are a warning or
// `mismatch` with the key and the ranks, nothing saved. Every piece is proved to lie in its
// storage, and the tree to contain itself nowhere, before anything is read: `invalid_argument` with
// the key and both numbers. Pieces without a storage are other ranks'. All ranks see the failure of
// any; until the commit, an older checkpoint in the directory stays whole
// (docs/design/commit.md).
IoReport save(const Value& tree, const Location& where, const SaveOptions& options, Group& group);
// One process alone, or with the options as they are.
IoReport save(const Value& tree, const Location& where, const SaveOptions& options = {});
IoReport save(const Value& tree, const Location& where, Group& group);

// Loading -----------------------------------------------------------------------------------------

struct LoadReport : IoReport {
  std::vector<std::string> missing;  // keys of `tree` that the checkpoint lacks, sorted
};

// Loads from a checkpoint of any kind into `tree`: tensor leaves in place, into the memory of their
// pieces; other leaves are replaced by the checkpoint's values, where these are or hold tensors in
// fresh memory that the tree owns. Extra keys of the checkpoint are ignored. Collective over
// `group`; each rank asks for its own pieces, and any layout is served from any other.
//
// Before any memory is written it throws
//   `not_found`         a missing key; the checkpoint itself
//   `mismatch`          another shape; a value for a tensor; another dtype without allow_cast,
//                       or one that needs allow_wrap
//   `unsupported`       dtypes between which there is no conversion
//   `invalid_argument`  a tree that contains itself; a piece that is not inside its tensor or its
//                       storage, with both numbers, or of which several elements have one place;
//                       two keys whose memory overlaps.
// One tensor may have two keys (tied weights). The memory is filled once and compared with what the
// checkpoint has for the other key: a difference is `mismatch`. A failure after the beginning
// leaves the pieces with undefined content.
LoadReport load(Value& tree, const Location& where, const LoadOptions& options, Group& group);
LoadReport load(Value& tree, const Location& where, const LoadOptions& options = {});
LoadReport load(Value& tree, const Location& where, Group& group);
// The same from a checkpoint that every rank has opened, also one that map() gave.
LoadReport load(Value& tree, const Checkpoint& checkpoint, const LoadOptions& options,
                Group& group);

}  // namespace tessera
