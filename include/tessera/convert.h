// Any kind of checkpoint into any other, streamed in bounded memory.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <stop_token>
#include <string>
#include <vector>

#include "tessera/checkpoint.h"

namespace tessera {

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
  ProgressHook progress = {};
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
//
// A target in a store is a DCP checkpoint at its root, or an object that the location names, of
// torch.save or safetensors. All else, and `resume`, needs directories that can be renamed:
// `unsupported`.
ConvertReport convert(const Location& source, const Location& target,
                      const ConvertOptions& options = {});
// The same from a checkpoint that is open, also one that map() gave; `options.open` has no effect.
// `resume` is `unsupported` for what map() gave: a function has no name to know it again by.
ConvertReport convert(const Checkpoint& source, const Location& target,
                      const ConvertOptions& options = {});

// Makes elements [begin, end) of a tensor, in row-major order, as many bytes as `out` has. Called
// by several threads at once, for any range.
using ElementFunction = std::function<void(const FlatRange& elements, MutableByteView out)>;
// A tensor whose elements are computed each time they are read; nothing of them is kept. The sample
// is tests/memory/lora.cpp.
[[nodiscard]] Tensor computed_tensor(DType dtype, const Shape& shape, ElementFunction elements);

}  // namespace tessera
