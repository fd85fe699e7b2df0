// How a tree travels in the string-to-string metadata of a safetensors file
// (docs/formats/safetensors.md): the paths of tensors, and everything that is not a tensor as
// tagged JSON.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "tessera/value.h"

namespace tessera {

inline constexpr const char* kTreeKey = "tessera.tree";  // our one entry of __metadata__

// The entry for these leaves; `values` counts the non-tensors in it. Leaves are tensors, plain
// data, or objects (kept as an archive of torch.save).
[[nodiscard]] std::string encode_tree(const std::vector<Leaf>& leaves, std::uint64_t& values);

// Gives tensors their paths back and appends the other leaves, in the order of the tree that was
// encoded. Without our entry the leaves stay as they are. Throws `corrupt` when the entry is
// malformed.
void add_from_metadata(const std::map<std::string, std::string>& metadata,
                       std::vector<Leaf>& leaves);

// Hands out the archives of torch.save that the entry holds, without reading them. Throws as
// add_from_metadata does.
void for_each_archive(const std::map<std::string, std::string>& metadata,
                      const std::function<void(std::vector<std::byte> bytes)>& take);

}  // namespace tessera
