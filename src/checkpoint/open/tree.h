// A checkpoint as one tree, and tied weights: one tensor under several names.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "tessera/checkpoint.h"
#include "tessera/leaf.h"

namespace tessera {

// A checkpoint as one tree.

// The file's own tree where it has one and `leaves` are still all of it, otherwise unflatten of
// `leaves`. Its nodes are the checkpoint's own: see Checkpoint::tree() for a copy.
[[nodiscard]] Value shared_tree(const Checkpoint& checkpoint);

// The indices of the leaves below `path`. A file that has only names knows no keys but strings: a
// key of another type is found there by its text.
[[nodiscard]] std::vector<std::size_t> leaves_below(const Checkpoint& checkpoint, const Path& path);
// `leaf` as it is seen from the place to which the first `steps` of its path lead.
[[nodiscard]] Leaf part_of(const Leaf& leaf, std::size_t steps);

// Tied weights: one tensor under several names. A safetensors file has it once and notes the other
// names in its `__metadata__`, as safetensors.torch.save_model does (docs/formats/safetensors.md).

// In the metadata of files whose notes are Tessera's own.
inline constexpr const char* kTiesKey = "tessera.ties";

// Which of the metadata is about the files rather than about their content.
[[nodiscard]] bool is_about_files(const std::string& key);

// Whether metadata of this name says that a tensor is `kept`, if that is the name of one: Tessera's
// own does. Other files' metadata may happen to be a tensor's name, so both names end alike, or
// both have dots.
[[nodiscard]] bool is_note(const std::string& name, const std::string& kept, bool is_ours);

// Whether a name may be noted, unless something else has it: the metadata means nothing else by it.
[[nodiscard]] bool can_be_noted(const std::string& name);

#pragma GCC visibility push(default)  // the command links it, see cmake/TesseraShared.cmake
// For each leaf the one whose elements it has, by its index: of those that are the same elements at
// the same place the first by name, as save_model keeps it. Of other leaves their own.
[[nodiscard]] std::vector<std::size_t> ties_of(const std::vector<Leaf>& leaves);
#pragma GCC visibility pop

// The tensors that the metadata of a set's files notes (name -> name of the tensor that it is).
class Notes {
 public:
  // `leaves`, all of them tensors or missing_value()s, are those of all files, and stay as they are
  // while this lives.
  explicit Notes(const std::vector<Leaf>& leaves) : leaves_(leaves) {}
  // The notes of one file. A note counts where the leaves have its second name alone.
  void add(const std::map<std::string, std::string>& metadata);
  [[nodiscard]] std::vector<Leaf> take();
  // What a reader should know of metadata that is no note, and could be meant as one.
  [[nodiscard]] std::vector<std::string> take_doubts() { return std::move(doubts_); }

 private:
  void index_names();

  const std::vector<Leaf>& leaves_;
  std::unordered_map<std::string_view, std::size_t> by_name_;  // made for the first note
  std::unordered_map<std::size_t, Value> tied_;
  std::map<std::string, Leaf> noted_;
  std::vector<std::string> doubts_;
};

}  // namespace tessera
