// The files that a checkpoint of an OLMo kind or a set of safetensors is made of, as one of N ranks
// fills them.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/open/olmo_state.h"
#include "checkpoint/together/share.h"
#include "checkpoint/together/shared_file.h"
#include "checkpoint/write/local_archives.h"
#include "checkpoint/write/safetensors_files.h"
#include "tessera/save_options.h"

namespace tessera {

// What a set of safetensors is called after.
inline constexpr const char* kSetFile = "model.safetensors";

class OlmoFiles {
 public:
  // `state`, `sources`, `tensors` and `options` outlive this. Throws `unsupported` for a state that
  // the kind cannot hold.
  struct Of {
    const OlmoState& state;
    const SourceTensors& sources;
    const PlacedTensors& tensors;
    CheckpointKind kind;
    const SaveOptions& options;
    int rank = 0;
    int ranks = 1;
  };
  explicit OlmoFiles(const Of& of);

  // What the others need to know of this rank's own file: the size of its pickle; 0: nothing.
  [[nodiscard]] std::uint64_t pickle_size() const;
  // Makes the files into which this rank writes. `pickle_sizes`: what all ranks said. `travels`:
  // whether only rank 0 reaches a file that belongs to all.
  void open(const std::vector<std::uint64_t>& pickle_sizes, bool travels);
  [[nodiscard]] const std::vector<std::unique_ptr<SharedFile>>& files() const { return files_; }
  // A digest of which tensors of a set of safetensors lie in which file.
  [[nodiscard]] std::uint64_t set_digest() const { return set_digest_; }
  // The index of a set of safetensors; empty: there is none.
  [[nodiscard]] const std::string& index() const { return index_; }

 private:
  void add(Archive archive, const FileRole& role);
  void add_part(const std::string& name, const Value& dict, std::uint32_t number);
  void open_full();
  void plan_set();
  void open_set(bool travels);
  void open_own_train();
  void open_legacy(const std::vector<std::uint64_t>& pickle_sizes);
  void open_local();
  [[nodiscard]] LegacyRank legacy(int rank) const;
  [[nodiscard]] bool writes_into_rows_of(int other) const;
  [[nodiscard]] int own_shard() const;

  Of of_;
  std::optional<LocalArchives> local_;
  std::unique_ptr<SharedArchive> own_legacy_;  // until open()
  std::vector<SafetensorsFile> set_;           // of safetensors, until open()
  std::uint64_t set_digest_ = 0;
  std::string index_;
  std::vector<std::unique_ptr<SharedFile>> files_;
};

}  // namespace tessera
