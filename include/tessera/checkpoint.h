// Checkpoints: opens any kind, and saves and loads a state tree on N ranks. convert.h converts
// them; verify.h compares them; job.h says what `stop`, `threads` and `progress` of options mean.
// A checkpoint is a tree of values whose tensor leaves say which piece of which tensor lies where.
// Everything here turns one set of pieces into another.
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
#include "tessera/job.h"
#include "tessera/leaf.h"
#include "tessera/load_options.h"
#include "tessera/open_options.h"
#include "tessera/save_options.h"
#include "tessera/storage.h"
#include "tessera/tensor_view.h"
#include "tessera/value.h"

namespace [[gnu::visibility("default")]] tessera {

// The OLMo kinds are directories (docs/formats/olmo.md). All of them name their leaves alike:
// "model.NAME", "optim.state.NAME.KEY", "optim.param_groups...", "train.KEY".
enum class CheckpointKind : std::uint8_t {
  dcp,
  torch_file,
  safetensors,
  olmo_full,
  olmo_torch_new,
  olmo_legacy,  // rank{r}.pt: sharded state dicts with "model"
  olmo_local,   // {model,optim,train}/rank{r}.pt: flat parameters
  rank_files,   // other files of one rank each: model_world_size_N_rank_R.pt, bare rank{r}.pt
  torchscript,  // an archive of C++'s torch::save or torch.jit.save: read, not written
  exported,     // an archive of torch.export.save: read, not written
  arena,        // what writer processes keep in memory (WriterOptions::keep): read, not written
  deepspeed,    // DeepSpeed's ZeRO, on any number of ranks: read, not written
  deepspeed_universal,  // what its ds_to_universal makes of that: read, not written
  gguf,                 // a file of llama.cpp (docs/formats/gguf.md): read, not written
};
[[nodiscard]] std::string_view to_string(CheckpointKind kind) noexcept;

struct ReadOptions {
  bool allow_cast = true;  // dtypes may differ; elements are converted
  // With allow_cast: permits integer types that cannot hold every value (docs/design/casts.md).
  bool allow_wrap = false;
  int threads = 2;                   // at most one for each request is used
  std::uint64_t memory = 64u << 20;  // bytes for all buffers together
  ProgressHook progress = {};
  std::stop_token stop = {};
};

struct ReadRequest {
  std::string name;                 // of a tensor
  TensorView to;                    // shaped like `slice`; a flat range is one dimension
  std::optional<Slice> slice = {};  // none: the whole tensor
};

// An opened checkpoint. Its metadata is in memory; tensor bytes stay where they are. All members
// may be called from several threads at once.
struct Checkpoint {
  // Detects the kind of a file, a directory or a store and reads its metadata once. Proves that the
  // pieces of every tensor cover it exactly once, and that every file that is there is long enough.
  // A data file of DCP or a file of an index that is missing matters to who asks for what lies in
  // it: that is `incomplete`, and require_files() tells it before. Throws `not_found` (no such
  // path, or a directory without a checkpoint in it: see Error::is_no_checkpoint()), `corrupt` or
  // `incomplete`. docs/hostile-cases.md lists every case.
  [[nodiscard]] static Checkpoint open(const Location& where, const OpenOptions& options = {});

  // Sorted names of the tensors that match the glob ('*', '?', '[a-z]'), also of those that an
  // index has in missing files. '*' matches dots, too.
  [[nodiscard]] std::vector<std::string> names(const std::string& glob = "*") const;
  // A tensor's dtype, shape and pieces. Throws `not_found`, and `mismatch` for any other value.
  [[nodiscard]] const Tensor& tensor(std::string_view name) const&;
  const Tensor& tensor(std::string_view name) const&& = delete;

  // Fills memory of any layout with a tensor or a slice of it. Reads only the bytes that the slice
  // needs. Before anything is written it throws
  //   `not_found`         there is no such name
  //   `mismatch`          `to` and the slice differ in shape; dtypes differ without allow_cast,
  //                       or the cast needs allow_wrap
  //   `incomplete`        wanted elements lie in a missing file
  //   `unsupported`       there is no conversion between the dtypes
  //   `invalid_argument`  the slice reaches outside the tensor; a view has several elements at one
  //                       place; two requests have memory that overlaps.
  // A part of a tensor is compared with digests if its files have them, as those do that Tessera
  // wrote or sealed. `bytes_unchecked` counts the rest.
  IoReport read(std::string_view name, const TensorView& to, const ReadOptions& options = {}) const;
  IoReport read(std::string_view name, const Slice& slice, const TensorView& to,
                const ReadOptions& options = {}) const;
  IoReport read_many(const std::vector<ReadRequest>& requests,
                     const ReadOptions& options = {}) const;

  // tree(), with every tensor in fresh memory that the tree owns, also those inside tuples and
  // objects. Checks every checksum of the tensors' bytes.
  [[nodiscard]] Value load(const LoadOptions& options = {}) const;
  // The `leaves` as nested containers. This is the file's own tree, if the file holds one and no
  // leaf was removed or replaced. Otherwise it is unflatten(leaves), which may throw. The result
  // may be changed: the checkpoint stays as it is. A value that lies in a missing file is
  // `incomplete`; tensors are when they are read.
  [[nodiscard]] Value tree() const;
  [[nodiscard]] const Leaf* find(std::string_view name) const;  // tensor or value; null: absent
  // What each file is to the checkpoint that lies in its directory, or that it names and that does
  // not, by name. Lists the directory. Of a checkpoint that is one file: of that alone.
  [[nodiscard]] std::vector<FileRow> directory() const;
  // Throws `incomplete` unless all files are there that its leaves lie in.
  void require_files() const;

  // This checkpoint with other leaves. It can be read, loaded or converted like any other; making
  // it reads no tensor. `fn` gets each leaf, in order, and returns its replacement: the same leaf,
  // a leaf with another `name` or `value` (such as computed_tensor of convert.h), or none to leave
  // it out. Throws `conflict` when two leaves get one name.
  using LeafFunction = std::function<std::optional<Leaf>(Leaf leaf)>;
  [[nodiscard]] Checkpoint map(const LeafFunction& fn) const;
  // This checkpoint with some of its leaves, to be used like one that map() returned:
  // `open(path).only({"model"}).load()` is a tree of a part. A key is the name of a leaf, what such
  // names begin with before a dot, or else a glob as in names(), which chooses among values, too.
  // Leaves keep their names. So where a list loses elements, those before the last one that stays
  // become empty dicts (`incomplete` from tree() and load() if that is more than 65,536). Throws
  // `not_found` for a key without a leaf, with one that is near.
  [[nodiscard]] Checkpoint only(const std::vector<std::string>& keys) const;

  CheckpointKind kind = CheckpointKind::dcp;
  std::string path;
  // In the checkpoint's own order; the pieces of each tensor cover it. Leaves may be removed, but
  // not renamed or reordered, because `find` looks them up.
  std::vector<Leaf> leaves;
  std::vector<Leaf> replicas;  // further copies of pieces, by their ranks: verify() compares them
  std::vector<ObjectInfo> files;  // the objects that belong to it
  std::string producer;           // what the files say about their origin; may be empty
  std::string save_id;            // DCP: names this save; empty elsewhere or in old files
  int world_size = 0;             // ranks whose files are there; 0: not known
  // Whether types of dicts and keys, and which tensors are parameters, are known: from torch.save
  // files and all that Tessera wrote. Elsewhere dicts are plain and keys are strings.
  bool has_types = false;
  std::vector<std::string> warnings;  // what a careful reader should know (a stale side file, ...)
  std::vector<FileRow> remarks;  // of files of which there is more to say than that they are used
  // `__metadata__` of safetensors files, but what is about files; where they differ, of the first.
  std::map<std::string, std::string> metadata;
  bool mapped = false;           // made by map()
  std::shared_ptr<Store> store;  // where `files` are; null: the checkpoint is in memory
  std::optional<Value> root;     // the tree, if the file holds one rather than names

 private:
  friend void index_names(Checkpoint& checkpoint);
  void index_names();
  std::vector<std::uint32_t> by_name_;  // positions in `leaves`; stale when their number differs
};

// Saving ------------------------------------------------------------------------------------------
// Saves `tree` as DCP or one of OLMo's kinds, in a directory or a store, or as one file.
//
// A file of torch.save or safetensors appears complete or not at all. One process saves it, whose
// tree has every tensor whole: several ranks are `unsupported`, a missing part is `incomplete`.
//
// A directory is saved by all ranks together: the call is collective over `group`, and each rank
// gives its own tree of the same structure. Tensor leaves carry the rank's own pieces, in memory, a
// device's too: `sharded` leaves as chunks (boxes), other leaves whole and the same on every rank.
// Pieces without a storage belong to other ranks. Where every tensor is held whole or has a
// Placement, as OLMo's kinds need, each rank computes what to write. Replicas are written once and
// compared (DCP: above 64 KiB by samples); values are compared whole, but for the "train" of an
// OLMo kind, which is each rank's own. Rank 0's options say what follows from a difference. Before
// anything is read, every piece must lie in its storage, and the tree must not contain itself: else
// `invalid_argument` names the key and both numbers. All ranks see the failure of any rank. Ranks
// that do not see what rank 0 puts into the directory are `incomplete` before anything is saved,
// with their hosts (OLMo's kinds: save_options.h); so are files that rank 0 does not see before the
// commit. Until then an older one there stays whole (docs/design/commit.md, checkpointers.md).
//
// If the peers are lost during the commit, a rank cannot know whether it has happened. Its error
// says so and gives the save id, for committed().
SaveResult save(const Value& tree, const Location& where, const SaveOptions& options, Group& group);
// The same by one process alone, and with default options.
SaveResult save(const Value& tree, const Location& where, const SaveOptions& options = {});
SaveResult save(const Value& tree, const Location& where, Group& group);

// Whether the checkpoint there is that of this save.
[[nodiscard]] bool committed(const Location& where, const std::string& save_id);

// Loading -----------------------------------------------------------------------------------------
// Loads from a checkpoint of any kind into `tree`. Tensor leaves are filled in place, in their
// pieces' memory, on a device too. Other leaves are replaced by the checkpoint's values, a none by
// all that lies below its key; their tensors get fresh memory that the tree owns. Collective over
// `group`: each rank asks for its own pieces, and any layout can be loaded from any other.
//
// Before any memory is written it throws one error for all keys that differ and that the options
// refuse (load_options.h has its codes), or
//   `not_found`         there is no checkpoint: Error::is_no_checkpoint() tells it from a key's
//   `invalid_argument`  the tree contains itself; a piece reaches outside its tensor or storage
//                       (with both numbers), or has several elements at one place; two keys have
//                       memory that overlaps.
// One tensor may have two keys (tied weights). Its memory is filled once, and then compared with
// what the checkpoint has for the other key: a difference is `mismatch`. A failure once memory is
// written leaves no values in any piece, on any rank: spoiled() of restore.h says what instead.
LoadReport load(Value& tree, const Location& where, const LoadOptions& options, Group& group);
LoadReport load(Value& tree, const Location& where, const LoadOptions& options = {});
LoadReport load(Value& tree, const Location& where, Group& group);
// The same from a checkpoint that every rank has opened, or that map() returned.
LoadReport load(Value& tree, const Checkpoint& checkpoint, const LoadOptions& options,
                Group& group);

}  // namespace tessera
