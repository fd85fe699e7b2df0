// What the kinds of checkpoints are, one row a kind: a new kind begins here.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/checkpoint.h"
#include "tessera/convert.h"
#include "tessera/storage.h"

#pragma GCC visibility push(default)  // the command links it, see cmake/TesseraShared.cmake
namespace tessera {

using Extensions = std::array<std::string_view, 4>;  // unused ones are empty
inline constexpr Extensions kTorchEnds{".pt", ".pth", ".bin", ".ckpt"};
inline constexpr Extensions kSafetensorsEnds{".safetensors"};
inline constexpr Extensions kGgufEnds{".gguf"};

struct KindRow {
  CheckpointKind kind;
  std::string_view name;  // as users write it
  std::string_view file;  // its name in a directory; empty: the kind is a directory
  Extensions extensions;  // of such files
  bool is_written;        // convert makes it
  bool is_saved;          // save() makes it
  bool is_split;          // over ranks
  bool is_olmo;           // one of OLMo's checkpointers makes it
};

// In the order of CheckpointKind.
inline constexpr std::array<KindRow, 14> kKinds = {{
    {CheckpointKind::dcp, "dcp", "", {}, true, true, true, false},
    {CheckpointKind::torch_file, "torch", "model.pt", kTorchEnds, true, true, false, false},
    {CheckpointKind::safetensors, "safetensors", "model.safetensors", kSafetensorsEnds, true, true,
     false, false},
    {CheckpointKind::olmo_full, "olmo-full", "", {}, true, true, false, true},
    {CheckpointKind::olmo_torch_new, "olmo-torch-new", "", {}, true, true, true, true},
    {CheckpointKind::olmo_legacy, "olmo-legacy", "", {}, true, true, true, true},
    {CheckpointKind::olmo_local, "olmo-local", "", {}, true, true, true, true},
    {CheckpointKind::rank_files, "rank-files", "", {}, false, false, true, false},
    {CheckpointKind::torchscript, "torchscript", "model.pt", {}, false, false, false, false},
    {CheckpointKind::exported, "exported", "model.pt2", {}, false, false, false, false},
    {CheckpointKind::arena, "arena", "", {}, false, false, true, false},
    {CheckpointKind::deepspeed, "deepspeed", "", {}, false, false, true, false},
    {CheckpointKind::deepspeed_universal,
     "deepspeed-universal",
     "",
     {},
     false,
     false,
     false,
     false},
    {CheckpointKind::gguf, "gguf", "model.gguf", kGgufEnds, false, false, false, false},
}};

// Throws `invalid_argument` for an option that was given and that a checkpoint of this kind has no
// use for.
void require_used(const OpenOptions& options, const Checkpoint& opened);
// The same for the options that say what may lie in the directory or lack there.
void require_presence_used(const OpenOptions& options, CheckpointKind kind,
                           const std::string& path);

[[nodiscard]] const KindRow& row_of(CheckpointKind kind) noexcept;
[[nodiscard]] inline bool is_one_file(CheckpointKind kind) noexcept {
  return !row_of(kind).file.empty();
}

// Whether a checkpoint of it has a marker (run/steps.h): runs go on from those.
[[nodiscard]] inline bool is_marked_kind(CheckpointKind kind) noexcept {
  return kind == CheckpointKind::dcp || row_of(kind).is_olmo;
}

[[nodiscard]] inline bool is_olmo_kind(CheckpointKind kind) noexcept {
  return row_of(kind).is_olmo;
}

}  // namespace tessera
#pragma GCC visibility pop

namespace tessera {

// What belongs to a checkpoint of those files that lie in its directory. The only place that says
// so, for conversions, saves and copies that replace one.

// Tells the checkpoint's own files, of whatever kind it is: another one that takes its place
// replaces them, and would be mixed with them otherwise. Whatever else lies there (notes, a
// tokenizer, results, an adapter's weights beside a model) is somebody's, and
// stays. By names and by indices of safetensors alone, so that it can be told of a damaged
// checkpoint too.
class Belonging {
 public:
  // `store`: at its root the checkpoint is, or was.
  explicit Belonging(const Store& store);
  Belonging(const Store& store, const std::vector<ObjectInfo>& files);  // that were listed already
  // `name`: relative to the checkpoint's directory.
  bool operator()(std::string_view name) const;

 private:
  std::set<std::string, std::less<>> own_;  // besides those of known names: a set, and its index
};

// Throws `io` if a directory in which a checkpoint's files may be is closed to us: Store::list
// passes over what is.
void require_own_open(const Store& store);

// Whether one of these files, by its name, is a checkpoint's.
[[nodiscard]] bool holds_checkpoint(const std::vector<ObjectInfo>& files);

// What a run calls the checkpoint of a step.

struct StepName {
  std::int64_t step = 0;
  bool unsharded = false;
};

// "step4" or "step4-unsharded".
[[nodiscard]] std::string to_string(const StepName& name);
// Takes such a name from the beginning of `text`, with a number as to_string writes it. None:
// `text` begins otherwise, and is unspecified then.
[[nodiscard]] std::optional<StepName> take_step_name(std::string_view& text);

}  // namespace tessera
