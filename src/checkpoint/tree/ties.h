// Tied weights: one tensor under several names. A safetensors file has it once and notes the other
// names in its `__metadata__`, as safetensors.torch.save_model does (docs/formats/safetensors.md).
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "tessera/leaf.h"

namespace tessera {

// In the metadata of files whose notes are Tessera's own.
inline constexpr const char* kTiesKey = "tessera.ties";

// Which of the metadata is about the files rather than about their content.
[[nodiscard]] bool is_about_files(const std::string& key);

// Whether metadata of this name says that a tensor is `kept`, if that is the name of one: Tessera's
// own does. Other files' metadata may happen to be a tensor's name, so both names end alike.
[[nodiscard]] bool is_note(const std::string& name, const std::string& kept, bool is_ours);

// Whether a name may be noted, unless something else has it: the metadata means nothing else by it.
[[nodiscard]] bool can_be_noted(const std::string& name);

// For each leaf the one whose elements it has, by its index: of those that are the same elements at
// the same place the first by name, as save_model keeps it. Of other leaves their own.
[[nodiscard]] std::vector<std::size_t> ties_of(const std::vector<Leaf>& leaves);

// The tensors that the metadata of a set's files notes (name -> name of the tensor that it is).
class Notes {
 public:
  // `leaves`, all of them tensors, are those of all files, and stay as they are while this lives.
  explicit Notes(const std::vector<Leaf>& leaves) : leaves_(leaves) {}
  // Of one file. A note counts where the leaves have its second name alone.
  void add(const std::map<std::string, std::string>& metadata);
  [[nodiscard]] std::vector<Leaf> take();

 private:
  void index_names();

  const std::vector<Leaf>& leaves_;
  std::unordered_map<std::string_view, std::size_t> by_name_;  // made for the first note
  std::unordered_map<std::size_t, Value> tied_;
  std::map<std::string, Leaf> noted_;
};

}  // namespace tessera
