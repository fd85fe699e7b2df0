// What a save takes and reports, beside its tree and its place (checkpoint.h).
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <vector>

#include "tessera/job.h"
#include "tessera/layout.h"

namespace [[gnu::visibility("default")]] tessera {

// What a save as one of OLMo's kinds takes beside SaveOptions (docs/formats/olmo.md).
//
// Ranks may have the directory on disks that they do not share:
//   olmo_full                 what other ranks hold travels through the group to rank 0's directory
//   olmo_legacy, olmo_local   each node has a directory of its own, with the files of its ranks and
//                             what belongs to all. The ranks that saved them restore from these.
//   olmo_torch_new            `incomplete` with ranks and hosts
// Nodes are found by what ranks see. No directory gets its name before all are complete. A node
// that fails then keeps its old one: the error says so, a restore finds two saves and refuses them
// (`mismatch`), and the next save repairs it. A disk that shows one rank the directory of another
// one late, as its own, is `conflict`, and nothing is published.

// The flat parameter of one module that FSDP1 wraps.
struct FlatUnit {
  std::string path;                // of the module, without wrappers; the root's is empty
  std::vector<std::string> names;  // of its parameters, whole and without wrappers, in order
};

// A mesh in which ranks hold copies of the model: rank r has the same part as r + N / copies of N.
struct OlmoMesh {
  int copies = 2;
  std::string device = "cpu";  // torch's name of its type: "cpu", "cuda"
};

struct OlmoSave {
  // The text of config.yaml, which is written last. Empty: one line that names the checkpointer.
  std::string config = {};
  // Model and optimizer of olmo_full become .safetensors with OLMo's names instead of .pt.
  bool safetensors = false;
  // The mesh of the DTensors that the tensors of olmo_legacy become. OLMo restores them in a hybrid
  // mesh of the same size and nowhere else. None: ShardedTensors over all ranks.
  std::optional<OlmoMesh> mesh = {};
  // The rest is of olmo_local alone. All modules that FSDP1 wraps, the root first, in the order of
  // named_modules. The parameters of one lie one after another in its flat parameter.
  std::vector<FlatUnit> units = {};
  // As FSDP1's use_orig_params: whether parameters begin at multiples of 16 bytes.
  bool orig_params = true;
  // The element type whose size that alignment counts in; none: that of the parameters.
  std::optional<DType> aligned_as = {};
};

// Safetensors in several files with an index, as huggingface has large models: which tensor goes
// into which file.

struct SafetensorsSet {
  // The number of each tensor's file, by the tensor's name, from 1 on. The largest number N is that
  // of the files: number i is model-0000i-of-0000N.safetensors. One that no tensor has is not
  // written. Every tensor must have a number, else that is `invalid_argument`. Empty: `max_size`
  // decides.
  std::map<std::string, int> file_of = {};
  // Tensors go into files in their order, a new one where one would have more bytes than this. One
  // that is larger has a file to itself. If one file holds all, it is model.safetensors, without an
  // index. 0: one file.
  std::uint64_t max_size = 0;
};

enum class CheckpointKind : std::uint8_t;  // checkpoint.h
struct Tensor;                             // value.h

// Who writes what several ranks hold.
enum class ReplicaWriter : std::uint8_t {
  fewest_bytes,  // the rank that writes the least so far
  lowest_rank,
};
// What a save does about a leaf that differs between ranks which should hold the same.
enum class IfDiffers : std::uint8_t {
  refuse,  // `mismatch` naming the keys and ranks; nothing is saved
  warn,    // says so and saves what the writer holds, or of a value the lowest rank
  // The lowest rank's is saved as NAME, and what each rank r holds that differs from it as
  // NAME.rank{r}, beside it in the tree (at its top, if NAME ends in no text). A load gives all
  // ranks that of NAME, unless LoadOptions::rename says otherwise. A name that is taken is
  // `conflict`. Of tensors those that ranks hold whole, in one piece; all their bytes are compared,
  // before anything is written. A part of a sharded tensor that differs is `mismatch`.
  keep,
};

// How items lie in the data files of a DCP checkpoint. PyTorch reads compressed ones where its
// Python has `zstandard` or `pyzstd`.
enum class Compression : std::uint8_t {
  none,
  zstd,  // each item is a frame of its own, as PyTorch's extension "stream.zstd" writes it
};

struct SaveOptions {
  // Any but rank_files. Unset: the extension of the path or object decides (.pt, .pth, .bin, .ckpt,
  // .safetensors); any other, and the name of a directory that is there, means dcp. In a directory
  // a file of kind torch_file or safetensors is model.pt or model.safetensors.
  std::optional<CheckpointKind> kind = {};
  bool overwrite = false;  // false: an existing checkpoint is `already_exists`
  // Nobody else saves to this place. Needed where a store cannot keep rivals out, see
  // docs/guide/object-stores.md; such a store is `unsupported` otherwise.
  bool single_writer = false;
  int threads = 2;  // writing threads on each rank; rank 0's is the number of a rank's files
  // DCP, rank 0's counts: each item (a value, or what a rank writes of a tensor in one box) has a
  // data file of its own, `threads` of which are written at once.
  bool one_file_an_item = false;
  // DCP, rank 0's count. A single file of torch.save or safetensors is not compressed: that is
  // `unsupported`. Levels are zstd's, 1 to 19: else `invalid_argument`. Each writing thread needs
  // memory for an encoder: a few MiB at level 3, 90 MiB at 19.
  Compression compression = Compression::none;
  int compression_level = 3;
  ReplicaWriter replicas = ReplicaWriter::fewest_bytes;
  // These two are for DCP saves by several ranks, where those of rank 0 count; other saves have
  // nothing to compare.
  IfDiffers values = IfDiffers::refuse;  // leaves that are no tensors
  IfDiffers copies = IfDiffers::warn;    // tensors and their parts that several ranks hold
  // Where `copies` is to warn: those of an optimizer's state (is_optimizer_name of leaf.h) are
  // refused. With one rank's moments on all of them a training goes on, and loses what it had.
  bool same_optimizer = false;
  // What a DCP save makes of its leaves, and with `name` and `dtype` a set of safetensors, too. The
  // functions are called several times for a key, and have to answer the same each time, on all
  // ranks alike. If ranks answer differently, `name` and `dtype` make other leaves of their trees,
  // as if these were different trees; of `writer` rank 0's answers count. Empty: as the tree is,
  // and as `replicas` says.
  //
  // The name that a leaf is saved under. Steps of its place in the dicts stay steps where the name
  // keeps them at its ends, and what is new between them is one key. A name that is empty or that
  // two leaves of a rank get is `conflict`.
  std::function<std::string(const std::string& key)> name = {};
  // The type that a tensor is saved as. Elements are converted as they are written, where that
  // needs no allow_wrap (docs/design/casts.md): else `invalid_argument`, and `unsupported` if there
  // is no conversion. Tensors inside of values stay as they are. `key`: the name that it is saved
  // under. A single file of torch.save or safetensors with either function is `unsupported`.
  std::function<DType(const std::string& key, const Tensor& tensor)> dtype = {};
  // Which of the ranks `holders`, ascending, that hold a part of a tensor writes it; asked where
  // there are several. Another rank is `invalid_argument`.
  std::function<int(const std::string& key, std::span<const int> holders)> writer = {};
  // Refuses keys that not every rank has (`mismatch`). Else they are saved from those that have
  // them, as stages of a pipeline need.
  bool same_keys = false;
  OlmoSave olmo = {};
  // Kind safetensors: a directory of such files that all ranks fill, instead of one file of one
  // process. The tree is then of tensors alone, each whole on every rank or with a placement.
  // Other options of DCP saves are `unsupported`. It appears whole, if a store can do so, too.
  std::optional<SafetensorsSet> safetensors = {};
  // One file of safetensors: as ConvertOptions has it. For any other kind it is `invalid_argument`.
  bool keep_duplicates = false;
  ProgressHook progress = {};
  EventHook events = {};  // phases: "plan", "write", for directories "commit"; "all"
  std::stop_token stop = {};
};

struct SaveResult : IoReport {    // bytes of this rank
  std::string save_id;            // DCP: names this save, as `.metadata` has it
  std::uint64_t files = 0;        // that all ranks wrote, with `.metadata` and its side file
  std::uint64_t total_bytes = 0;  // in all of them
  // In a file of safetensors, whose metadata has them as tagged JSON: those that are no tensors.
  std::uint64_t values_in_metadata = 0;
};

}  // namespace tessera
