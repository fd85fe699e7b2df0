// How a checkpoint is opened, and what its files are to it
// (docs/guide/what-is-in-a-directory.md).
#pragma once

#include <cstdint>
#include <optional>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

namespace [[gnu::visibility("default")]] tessera {

struct OpenOptions {
  std::uint64_t header_limit = 100'000'000;  // bytes before the data of safetensors and GGUF
  std::stop_token stop = {};                 // asked at each look into the store
  bool part = false;  // one file of several ranks': its local tensors; else it is `incomplete`
  bool raw = false;   // torch.save: whole modules as pickled, else as what state_dict() gives
  // Leaves whose bytes lie in files that are missing are left out, with a warning that counts them.
  // Else they are there, and `incomplete` for who asks for one.
  bool partial = false;
  bool ignore_index = false;  // of a set: the files that are there say what they hold
  // Of files that several ranks wrote under the same names and that do not say how tensors are cut
  // (vLLM's sharded state): those of this rank.
  std::optional<int> rank = {};
  // Faults to pass over, with a warning; another word is `invalid_argument`. "trailing-bytes":
  // bytes behind the last tensor of a safetensors or GGUF file, or behind the end of a zip of
  // torch.save.
  std::vector<std::string> accept = {};
};

enum class FileState : std::uint8_t {
  used,            // what it holds is the checkpoint's
  superseded,      // another file holds what it would be read for
  missing,         // the checkpoint names it, and it is not there
  not_part,        // something else that lies in the directory
  not_understood,  // named as files of checkpoints are, and nothing says what it is to this one
};
// "used", "superseded", "missing", "not part of it", "not understood".
[[nodiscard]] std::string_view to_string(FileState state) noexcept;

struct FileRow {
  std::string name;  // in the checkpoint's store
  FileState state = FileState::used;
  std::string reason = {};  // empty: there is no more to say
  std::uint64_t size = 0;   // bytes; 0: missing
};

}  // namespace tessera
