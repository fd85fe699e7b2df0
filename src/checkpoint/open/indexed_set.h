// Sets of files with an index as huggingface writes it (docs/formats/safetensors.md): which files
// they are, and whether these have what the index says.
#pragma once

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "format/safetensors/index.h"
#include "storage/lazy_source.h"
#include "tessera/checkpoint.h"

namespace tessera {

// What files and indices of a format are called.
struct SetNames {
  std::string_view suffix;        // of files
  std::string_view index_suffix;  // of indices
  std::string_view usual;         // the file that is a model alone
  std::string_view usual_index;   // the index that counts where there are several
  // What other programs look for where it is not there; empty: nothing.
  std::array<std::string_view, 2> others = {};
};
inline constexpr SetNames kSafetensorsSet{".safetensors", safetensors::kIndexSuffix,
                                          "model.safetensors", "model.safetensors.index.json"};
// The others: diffusers, peft. Unlike a .safetensors, a .bin may be anything.
inline constexpr SetNames kTorchSet{".bin",
                                    safetensors::kTorchIndexSuffix,
                                    "pytorch_model.bin",
                                    "pytorch_model.bin.index.json",
                                    {"diffusion_pytorch_model.bin", "adapter_model.bin"}};
// Whether the file is one of these alone, or an index, by its name.
[[nodiscard]] bool is_telling(std::string_view name, const SetNames& names);

using FileByName = std::map<std::string, ObjectInfo>;
// The files that an index names.
struct IndexedFiles {
  FileByName here;
  std::set<std::string> missing;
};
// Whether the index has the tensor in another file than this.
[[nodiscard]] bool is_superseded(const safetensors::Index& index, const std::string& tensor,
                                 const std::string& file);
using Holders = std::map<std::string, std::string>;  // tensor -> the file that has it

// The index that speaks for the directory; empty: none. That of another form of the model speaks
// only where nothing else is. Throws `conflict` for several.
[[nodiscard]] std::string find_index(const std::vector<ObjectInfo>& files, const SetNames& names,
                                     const Store& store);
// The file that an index is about if it is alone: its name without the end.
[[nodiscard]] std::string single_of(const std::string& index);
[[nodiscard]] safetensors::Index read_set_index(const Store& store, const std::string& name);
// The files that the index names; `present`: what is beside it. Throws `incomplete` when none is
// there; `advice` is asked for what can be done then.
[[nodiscard]] IndexedFiles files_in(const safetensors::Index& index,
                                    const std::vector<ObjectInfo>& present, const Store& store,
                                    const std::function<std::string()>& advice);

// Tensors that a file of a set has and the index has elsewhere, by file.
using Superseded = std::map<std::string, std::vector<std::string>>;
// A remark on each of these files.
void remark_superseded(const Superseded& superseded, Checkpoint& checkpoint);

// What stands for the missing files of a set, by their names.
using MissingFiles = std::map<std::string, std::shared_ptr<const LazySource>>;
[[nodiscard]] MissingFiles missing_sources(const std::set<std::string>& names,
                                           const std::shared_ptr<const Store>& store);

// Adds leaves for the tensors that the index has in missing files, and remarks on these files. A
// tree that the metadata describes has them.
void add_missing(const safetensors::Index& index, const MissingFiles& missing,
                 Checkpoint& checkpoint);
// Takes these leaves away again where that is asked for, and warns of what is missing.
void settle_missing(bool partial, Checkpoint& checkpoint);

// What the files hold under their names, before any of it finds its place in a tree. Throws
// `incomplete` for a tensor that is not where the index has it, and adds the warnings. Nothing is
// known of missing files.
void check_against(const safetensors::Index& index, const IndexedFiles& files, Holders holders,
                   Checkpoint& checkpoint);
// Puts the index among the checkpoint's files, and tells of files that it does not name.
void add_index(const std::string& name, const std::vector<ObjectInfo>& present,
               const IndexedFiles& named, const SetNames& names, Checkpoint& checkpoint);
// What is wrong with the index's total_size; none: nothing, or it has none.
[[nodiscard]] std::optional<std::string> index_total_fault(const safetensors::Index& index,
                                                           const std::vector<Leaf>& leaves);

}  // namespace tessera
