// Converts any kind of checkpoint into any other, streamed in bounded memory.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/checkpoint.h"

namespace [[gnu::visibility("default")]] tessera {

// The names of the kinds of checkpoints, as users write them: "dcp", "torch", "olmo-full".

// The inverse of to_string(CheckpointKind). Throws `invalid_argument` with the names that there
// are.
[[nodiscard]] CheckpointKind kind_named(std::string_view name);
// The kind of a file, by its name's extension; none: the name is of no file.
[[nodiscard]] std::optional<CheckpointKind> kind_of_file_name(const std::filesystem::path& path);
// The kind of file that a target's name asks for; none, too, where a directory has that name.
[[nodiscard]] std::optional<CheckpointKind> kind_of_target(const Location& target);

// How an OLMo target is laid out.
struct OlmoOptions {
  // olmo_local: a module whose whole path matches this regular expression (of RE2: without looking
  // ahead or behind, without back-references; its time is linear) has a flat parameter of its own;
  // the root has what remains. Empty: the source's own units if it is of this kind, else one for
  // each block, "(.*\.)?blocks\.[0-9]+".
  std::string unit;
  // olmo_local: FSDP's use_orig_params. Unset: as in the source, else true, as in OLMo.
  std::optional<bool> orig_params;
  bool safetensors = false;  // olmo_full: model and optim as safetensors with OLMo's names
  bool model_only = false;   // olmo_full: no optimizer, no trainer state
  std::string config;        // a config.yaml to copy; empty: the source's, if it has one
};

struct ConvertOptions {
  CheckpointKind to = CheckpointKind::safetensors;
  // Ranks that share the target, 1 to 2^20, for dcp, olmo_torch_new, olmo_legacy and olmo_local.
  int ranks = 1;
  OlmoOptions olmo;
  bool overwrite = false;  // replaces an existing target atomically
  // Nobody else writes this target. Needed where a store cannot keep rivals out
  // (docs/guide/object-stores.md).
  bool single_writer = false;
  // Keeps the files that an interrupted conversion with this option, the same source and the same
  // options has finished, after it has read and compared them; others begin anew. Interrupted, it
  // leaves its own to a later one (docs/design/resume.md): in ".NAME.resume" beside the target, for
  // dcp in ".resume" inside it. What another conversion left there is removed; while another one
  // works there, this one is `conflict`.
  bool resume = false;
  int threads = 2;
  std::uint64_t memory = 64u << 20;  // bytes for all buffers together
  // "model", "optim", and keys as of Checkpoint::only; empty: everything. `not_found` for one that
  // chooses nothing.
  std::vector<std::string> only;
  // "NAME[0:10]", "NAME[2:,:4]": of this tensor, under its name in the source, a part alone, as
  // Python slices, without steps; a single number keeps its dimension. `not_found` for a name that
  // is not there or not chosen, `mismatch` for no tensor, `invalid_argument` for a slice without
  // elements or outside of the tensor, and for a second one of a tensor.
  std::vector<std::string> slice;
  // Rules "RE=>TO" over names, applied in order to every match. RE is one as OlmoOptions::unit; in
  // TO `\1` and `$1` are its first group, `$&` and `\0` the whole match, `\\` and `$$` the
  // character itself. A group that RE lacks is `invalid_argument`, two names that become one are
  // `conflict`.
  std::vector<std::string> rename;
  // Converts all floating tensors of 16 bits and more to this type, rounded to nearest, ties to
  // even. float8, float4 and complex types are `unsupported` here. Integer types cut off fractions
  // and wrap what does not fit; without `allow_wrap` they are `invalid_argument`
  // (docs/design/casts.md).
  std::optional<DType> dtype;
  bool allow_wrap = false;
  // Safetensors: if all tensors together have more bytes than this, they go into several files and
  // an index, as huggingface does it. The target is then a directory, and appears whole. 0: one
  // file. A tensor is never divided.
  std::uint64_t max_shard_size = 0;
  // The same, by a map from names to numbers of files (tessera/save_options.h); `max_shard_size`
  // is 0 then.
  std::map<std::string, int> file_of = {};
  // Safetensors: a tensor that the source has under several names (tied weights) is written under
  // each of them. Else it is written under the first by name, and the metadata notes the others, as
  // safetensors.torch.save_model does (docs/formats/safetensors.md).
  bool keep_duplicates = false;
  // Writes quantized weights (docs/formats/safetensors.md, gguf.md) as this floating type, without
  // their scales. `only` and `rename` see the resulting names. Unset: quantized weights are copied
  // as they are.
  std::optional<DType> dequantize;
  OpenOptions open;
  ProgressHook progress = {};
  // Files that are finished stay for a later run with `resume`; without `resume` nothing stays.
  std::stop_token stop = {};
};

struct ConvertReport {
  IoReport io;
  std::string target;  // what was written: the file, or the directory of a kind that is one
  std::uint64_t tensors = 0;
  std::uint64_t values_in_metadata = 0;  // non-tensors that travel as tagged JSON (docs/formats)
  std::uint64_t bytes_resumed = 0;  // of files that an interrupted run had finished and were right
  std::vector<std::string> notes;   // what the caller should know: no config.yaml, ...
};

// Streams the checkpoint at `source` into `target` in bounded memory. Reads every byte of the
// source and checks its checksum. `target` appears complete or not at all. If it does not appear,
// nothing else is left either, not even directories that were made for it (docs/design/commit.md
// says what a killed process may leave). With `overwrite`, what lies in a directory that is
// replaced and is no checkpoint's own stays there. Throws `invalid_argument` for an option that was
// given and would have no effect on this kind of target or source, and `conflict` while another
// process converts into the same DCP directory.
//
// A target of kind torch_file or safetensors is the file that it names, or, where that is a
// directory or ends with a slash, model.pt or model.safetensors in it. A link stays, and leads to
// what is made.
//
// A target in a store is a DCP checkpoint at the store's root, or an object of torch.save or
// safetensors that the location names. Everything else is `unsupported` in a store, and so is
// `resume`: it needs directories that can be renamed.
ConvertReport convert(const Location& source, const Location& target,
                      const ConvertOptions& options = {});
// The same from an open checkpoint, also from one that map() made; `options.open` has no effect.
// `resume` is `unsupported` for what map() made: nothing tells a later run that a function is the
// same.
ConvertReport convert(const Checkpoint& source, const Location& target,
                      const ConvertOptions& options = {});

// Computes elements [begin, end) of a tensor, in row-major order; they fill `out` exactly. Several
// threads call it at once, for any range.
using ElementFunction = std::function<void(const FlatRange& elements, MutableByteView out)>;
// A tensor whose elements are computed each time they are read; none of them are kept.
// tests/memory/lora.cpp is a sample.
[[nodiscard]] Tensor computed_tensor(DType dtype, const Shape& shape, ElementFunction elements);

}  // namespace tessera
