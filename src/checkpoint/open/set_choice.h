// Which files of a directory are its set of safetensors files, or of files of torch.save.
#pragma once

#include <string>
#include <vector>

#include "checkpoint/open/indexed_set.h"
#include "tessera/checkpoint.h"

namespace tessera {

struct SetChoice {
  std::vector<ObjectInfo> near;   // what lies beside each other
  std::string index;              // that decides; empty: the files do
  std::vector<ObjectInfo> files;  // without an index: all of the set
  std::vector<FileRow> remarks;   // of files that are no part of it
};

// `decided`: what lies in the directory and in folders that decide what it is. Throws `conflict`
// for what may be one or the other checkpoint, and `unsupported` for files of ranks that do not say
// how tensors are cut, unless the options choose; `not_found` for a rank that has no files.
[[nodiscard]] SetChoice choose_set(const std::vector<ObjectInfo>& decided, const SetNames& names,
                                   const Store& store, const OpenOptions& options);

}  // namespace tessera
