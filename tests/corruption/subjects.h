// Checkpoints in memory that are damaged and read again and again.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tessera/checkpoint.h"

namespace tessera::corruption {

using Bytes = std::vector<std::byte>;
using Files = std::map<std::string, std::shared_ptr<const Bytes>>;  // name -> content

// Bytes [begin, end) of a file.
struct Extent {
  std::string file;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

struct Subject {
  std::string name;
  bool ours = false;         // written by us: all of it is under digests, or a .pt
  bool single_file = false;  // opened as a file, not as a directory
  Files files;
  Files older;                  // the same names as an earlier save wrote them; empty: none
  std::vector<Extent> extents;  // where damage is done: tensors' bytes, of ours whole files
  std::uint64_t content = 0;    // content_of its clean state
};

// What a reader gets, in one number: names, types, shapes and elements of tensors, values.
[[nodiscard]] std::uint64_t content_of(const Checkpoint& checkpoint);
// Opens these files as the subject is opened.
[[nodiscard]] Checkpoint open(const Subject& subject, const Files& files);

// Written by PyTorch, from the goldens below `golden` and at the paths `more`: damage goes into
// tensors' bytes.
[[nodiscard]] std::vector<Subject> pytorch_subjects(const std::string& golden,
                                                    const std::vector<std::string>& more);
// Written by us into `scratch`, each kind: damage goes anywhere into DCP and safetensors, and into
// tensors' bytes of a .pt.
[[nodiscard]] std::vector<Subject> our_subjects(const std::string& scratch);

}  // namespace tessera::corruption
