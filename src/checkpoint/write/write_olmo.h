// What the writers of the OLMo kinds share: the archives that these kinds are made of, whoever
// writes them.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "checkpoint/open/olmo_state.h"
#include "checkpoint/write/targets.h"
#include "checkpoint/write/write_archive.h"
#include "format/safetensors/safetensors.h"
#include "tessera/save_options.h"

namespace tessera {

// The tensors of a training state, with the names that errors give them.
class SourceTensors {
 public:
  explicit SourceTensors(const OlmoState& state);
  explicit SourceTensors(const std::vector<Leaf>& leaves);  // tensors
  // `tensor` must be a leaf of the state's model or optimizer.
  [[nodiscard]] const Leaf& of(const Tensor& tensor) const { return *by_tensor_.at(&tensor); }
  // All of them, in the order of the state.
  [[nodiscard]] std::vector<const Leaf*> all() const;

 private:
  void add(const std::string& name, const Value& value);

  std::deque<Leaf> leaves_;
  std::unordered_map<const Tensor*, const Leaf*> by_tensor_;
};

// A copy of `tree` in which dicts and lists are new and every tensor leaf is what `replace` says.
[[nodiscard]] Value with_tensors(const Value& tree,
                                 const std::function<Value(const Tensor&)>& replace);
// A leaf of `archive` that holds all of `tensor`.
[[nodiscard]] Value whole_tensor(const SourceTensors& sources, const Tensor& tensor,
                                 Archive& archive);

// What is in metadata.yaml (checkpoint-rows O-77).
[[nodiscard]] std::string world_file_text(int ranks);
// What OLMo calls the checkpointer that reads a sharded kind; empty: none is named.
[[nodiscard]] std::string_view sharded_checkpointer_name(CheckpointKind kind);

// `name`, holding the whole tensors of a part of the state: model.pt, optim.pt.
[[nodiscard]] Archive part_archive(const SourceTensors& sources, const std::string& name,
                                   const Value& dict);
// A part of the state as a safetensors file with OLMo's names (checkpoint-rows F-06).
struct EncodedPart {
  safetensors::Header header;
  std::vector<std::byte> head;                           // what is before the data
  std::map<std::string, const Leaf*> tensors;            // by name in the file
  std::map<std::string, std::vector<std::byte>> values;  // all else, as pickles
  bool has_digests = false;                              // room for them, in `head`

  [[nodiscard]] std::uint64_t size() const {
    return header.data_offset + (header.entries.empty() ? 0 : header.entries.back().end);
  }
};
[[nodiscard]] EncodedPart encoded_part(const SourceTensors& sources, const Value& dict);
// Whose legacy file it is.
struct LegacyRank {
  int rank = 0;
  int ranks = 1;
  std::optional<OlmoMesh> mesh = {};

  // How many ranks share the rows of a tensor, and which of them this is.
  [[nodiscard]] int parts() const { return mesh ? ranks / mesh->copies : ranks; }
  [[nodiscard]] int part() const { return rank % parts(); }
};
// The rank's rows of a tensor that is neither a scalar nor without elements; none: it has no rows.
[[nodiscard]] std::optional<Box> legacy_rows(const Shape& shape, const LegacyRank& of);
// The file of one rank, with its rows of every tensor (checkpoint-rows O-60).
[[nodiscard]] Archive legacy_archive(const OlmoState& state, const SourceTensors& sources,
                                     const LegacyRank& of);

void write_olmo_full(ConvertJob& job, const OlmoState& state);
void write_olmo_torch_new(ConvertJob& job, const OlmoState& state);
void write_olmo_legacy(ConvertJob& job, const OlmoState& state);
void write_olmo_local(ConvertJob& job, const OlmoState& state);
// The trainer's state as `name`, when there is one.
void write_train(const ConvertJob& job, const OlmoState& state, const std::string& name);

}  // namespace tessera
