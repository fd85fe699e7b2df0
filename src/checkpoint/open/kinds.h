// What the kinds of checkpoints are, one row a kind: a new kind begins here.
#pragma once

#include <array>
#include <filesystem>
#include <optional>
#include <string_view>

#include "tessera/checkpoint.h"
#include "tessera/kinds.h"

#pragma GCC visibility push(default)  // the command links it, see cmake/TesseraShared.cmake
namespace tessera {

using Extensions = std::array<std::string_view, 4>;  // unused ones are empty
inline constexpr Extensions kTorchEnds{".pt", ".pth", ".bin", ".ckpt"};
inline constexpr Extensions kSafetensorsEnds{".safetensors"};

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
inline constexpr std::array<KindRow, 8> kKinds = {{
    {CheckpointKind::dcp, "dcp", "", {}, true, true, true, false},
    {CheckpointKind::torch_file, "torch", "model.pt", kTorchEnds, true, true, false, false},
    {CheckpointKind::safetensors, "safetensors", "model.safetensors", kSafetensorsEnds, true, true,
     false, false},
    {CheckpointKind::olmo_full, "olmo-full", "", {}, true, true, false, true},
    {CheckpointKind::olmo_torch_new, "olmo-torch-new", "", {}, true, true, true, true},
    {CheckpointKind::olmo_legacy, "olmo-legacy", "", {}, true, true, true, true},
    {CheckpointKind::olmo_local, "olmo-local", "", {}, true, true, true, true},
    {CheckpointKind::rank_files, "rank-files", "", {}, false, false, true, false},
}};

// Throws `invalid_argument` for an option that was given and that a checkpoint of this kind has no
// use for.
void require_used(const OpenOptions& options, const Checkpoint& opened);

[[nodiscard]] const KindRow& row_of(CheckpointKind kind) noexcept;
[[nodiscard]] inline bool is_one_file(CheckpointKind kind) noexcept {
  return !row_of(kind).file.empty();
}

[[nodiscard]] inline bool is_olmo_kind(CheckpointKind kind) noexcept {
  return row_of(kind).is_olmo;
}

}  // namespace tessera
#pragma GCC visibility pop
