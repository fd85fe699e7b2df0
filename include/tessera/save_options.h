// What a save takes and reports, beside its tree and its place (checkpoint.h).
#pragma once

#include <cstdint>
#include <optional>
#include <stop_token>
#include <string>

#include "tessera/job.h"

namespace tessera {

enum class CheckpointKind : std::uint8_t;  // checkpoint.h

// Who writes what several ranks hold.
enum class ReplicaWriter : std::uint8_t {
  fewest_bytes,  // the rank that writes the least so far
  lowest_rank,
};
// What a save does about a leaf that differs between ranks which should hold the same.
enum class IfDiffers : std::uint8_t {
  refuse,  // `mismatch` naming the keys and ranks; nothing is saved
  warn,    // says so and saves what the writer holds, or of a value the lowest rank
  // Of values alone: the lowest rank's is saved as NAME, and what each rank r holds that differs
  // from it as NAME.rank{r}, beside it in the tree (at its top, if NAME ends in no text). A load
  // gives all ranks that of NAME, unless LoadOptions::rename says otherwise. A name that is taken
  // is `conflict`.
  keep,
};

// How items lie in the data files of a DCP checkpoint. PyTorch reads compressed ones where its
// Python has `zstandard` or `pyzstd`.
enum class Compression : std::uint8_t {
  none,
  zstd,  // each item is a frame of its own, as PyTorch's extension "stream.zstd" writes it
};

struct SaveOptions {
  // dcp, torch_file or safetensors. Unset: the extension of the path or object decides (.pt, .pth,
  // .safetensors); any other means dcp.
  std::optional<CheckpointKind> kind = {};
  bool overwrite = false;  // false: an existing checkpoint is `already_exists`
  int threads = 2;         // writing threads on each rank; rank 0's is the number of a rank's files
  // DCP, rank 0's counts: each item (a value, or what a rank writes of a tensor in one box) has a
  // data file of its own, `threads` of which are written at once.
  bool one_file_an_item = false;
  // DCP, rank 0's count. A single file of torch.save or safetensors is not compressed: that is
  // `unsupported`. Levels are zstd's, 1 to 19: else `invalid_argument`.
  Compression compression = Compression::none;
  int compression_level = 3;
  ReplicaWriter replicas = ReplicaWriter::fewest_bytes;
  IfDiffers values = IfDiffers::refuse;  // leaves that are no tensors
  IfDiffers copies = IfDiffers::warn;    // parts of tensors that several ranks hold; `keep` is
                                         // `unsupported`
  // Refuses keys that not every rank has (`mismatch`). Else they are saved from those that have
  // them, as stages of a pipeline need.
  bool same_keys = false;
  ProgressHook progress = {};
  EventHook events = {};  // phases: "plan", "write", for DCP "commit"; "all"
  std::stop_token stop = {};
};

struct SaveResult : IoReport {    // bytes of this rank
  std::string save_id;            // DCP: names this save, as `.metadata` has it
  std::uint64_t files = 0;        // that all ranks wrote, with `.metadata` and its side file
  std::uint64_t total_bytes = 0;  // in all of them
};

}  // namespace tessera
