// Files and directories that people take for checkpoints and that are in no form that is read: what
// they are is said, rather than that nothing is there (docs/formats/trainers.md).
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tessera/checkpoint.h"
#include "tessera/io.h"
#include "tessera/storage.h"

namespace tessera {

// Throws `unsupported` for a file by its name, and where that is common by what the file begins
// with.
void refuse_foreign_archive(const ByteSource& file);
// The same for a directory, by the names of its files and directories.
void refuse_foreign_directory(const Store& store, const std::vector<ObjectInfo>& files);

// What is left behind: files of a training's state that lie in a checkpoint's directory and that it
// does not have.

// By names as transformers, accelerate and others give them: "optimizer.pt", "rng_state_3.pth".
[[nodiscard]] bool is_training_state(std::string_view name);
// Says so, in a remark and a warning, of each of the files that lie at the root of the directory
// that was opened; of others it says nothing.
void remark_left_behind(const std::vector<ObjectInfo>& files, Checkpoint& checkpoint);
// That warning again, for who takes the checkpoint elsewhere; empty: nothing is left behind.
[[nodiscard]] std::string text_of_left_behind(const Checkpoint& checkpoint);

}  // namespace tessera
