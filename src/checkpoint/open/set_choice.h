// Which files of a directory are its set of safetensors files, or of files of torch.save.
#pragma once

#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/open/indexed_set.h"
#include "tessera/checkpoint.h"

namespace tessera {

struct SetChoice {
  std::vector<ObjectInfo> near;   // what lies beside each other
  std::string index;              // that decides; empty: the files do
  std::vector<ObjectInfo> files;  // without an index: all of the set
  std::vector<FileRow> remarks;   // of files that are no part of it
  std::set<std::string> missing;  // without an index: files that must have been there
  std::set<std::string> ignored;  // that are not here, and that an index names which is ignored
};

inline constexpr const char* kBeside = "another form of the model, or beside it";

// Whether a file of this name, of a set or an index, has the weights in another form (Mistral's
// own), or is an adapter to a model.
[[nodiscard]] bool is_other_form(std::string_view name);
// Whether the files that lie beside each other have a set, or an index, that is no other form.
[[nodiscard]] bool has_own_form(const std::vector<ObjectInfo>& files, const SetNames& names);

// What is missing where no index tells, for names alone cannot say what lies there. Throws
// `incomplete` of `what` unless it is passed over.
void pass_over(const std::vector<std::string>& missing, const std::string& what, const Store& store,
               const OpenOptions& options, SetChoice& choice);
// A remark on each of them.
void remark_missing(const MissingFiles& missing, Checkpoint& checkpoint);

// `decided`: what lies in the directory and in folders that decide what it is. Throws `conflict`
// for what may be one or the other checkpoint, and `unsupported` for files of ranks that do not say
// how tensors are cut, unless the options choose; `not_found` for a rank that has no files, or if
// no file is left without the index; `incomplete` for files that digests or numbers tell of, unless
// they may be missing.
[[nodiscard]] SetChoice choose_set(const std::vector<ObjectInfo>& decided, const SetNames& names,
                                   const Store& store, const OpenOptions& options);

}  // namespace tessera
