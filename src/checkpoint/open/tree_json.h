// What the names of tensors cannot say of a tree, as JSON: the entry of a safetensors file's
// metadata (docs/formats/safetensors.md) and a part of DCP's side file (docs/formats/side-file.md).
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "tessera/leaf.h"
#include "tessera/value.h"

namespace tessera {

inline constexpr const char* kTreeKey = "tessera.tree";  // our one entry of __metadata__

// The entry for these leaves; `values` counts the non-tensors in it. Leaves are tensors, plain
// data, or objects (kept as an archive of torch.save). Tensors inside of the latter are leaves too,
// without a path: the entry refers to them by name.
[[nodiscard]] std::string encode_tree(const std::vector<Leaf>& leaves, std::uint64_t& values);

// Gives tensors their paths and types back and appends the other leaves, in the order of the tree
// that was encoded; tensors inside of these are leaves no longer. Without our entry the leaves stay
// as they are. Returns whether the types of containers and keys are known now: entries from before
// say nothing of them. Throws `corrupt` when the entry is malformed.
bool add_from_metadata(const std::map<std::string, std::string>& metadata,
                       std::vector<Leaf>& leaves);

// Hands out the archives of torch.save that our entry holds, without reading them. Throws as
// add_from_metadata does.
void for_each_archive(const std::map<std::string, std::string>& metadata,
                      const std::function<void(std::vector<std::byte> bytes)>& take);

// An empty dict has no entry in `.metadata`: one that PyTorch's rule does not make lets its loader
// take the whole for a checkpoint of before torch 2.4.
[[nodiscard]] bool is_empty_dict(const Leaf& leaf);

// Takes away the empty dicts that have leaves below them: another rank has filled what is empty on
// rank 0.
void drop_filled_dicts(std::vector<Leaf>& leaves);

// The types alone, and the empty dicts, for leaves whose names and paths, of strings and indices,
// are known. Attributes of tensors that hold other tensors are left out.
[[nodiscard]] std::string encode_types(const std::vector<Leaf>& leaves);
// Gives them back to leaves with these names, in the order in which they were. Throws `corrupt`
// when `text` is malformed.
void add_types(const std::string& text, std::vector<Leaf>& leaves);

}  // namespace tessera
