// Tied weights: one tensor under several names. A safetensors file has it once and notes the other
// names in its `__metadata__`, as safetensors.torch.save_model does (docs/formats/safetensors.md).
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <vector>

#include "tessera/leaf.h"

namespace tessera {

// Which of the metadata is about the files rather than about their content.
[[nodiscard]] bool is_about_files(const std::string& key);

// Whether a name may be noted, unless something else has it: the metadata means nothing else by it.
[[nodiscard]] bool can_be_noted(const std::string& name);

// For each leaf the one whose elements it has, by its index: of those that are the same elements at
// the same place the first by name, as save_model keeps it. Of other leaves their own.
[[nodiscard]] std::vector<std::size_t> ties_of(const std::vector<Leaf>& leaves);

// Adds a leaf for every note in `metadata` (name -> name of the tensor that it is) of which the
// leaves, all of them tensors, have the second name alone.
void add_noted(const std::map<std::string, std::string>& metadata, std::vector<Leaf>& leaves);

}  // namespace tessera
