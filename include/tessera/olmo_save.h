// What a save as one of OLMo's kinds takes beside SaveOptions (docs/formats/olmo.md).
//
// Ranks may have the directory on disks that they do not share:
//   olmo_full                 what other ranks hold travels through the group to rank 0's directory
//   olmo_legacy, olmo_local   each node has a directory of its own, with the files of its ranks and
//                             what belongs to all. The ranks that saved them restore from these.
//   olmo_torch_new            `incomplete` with ranks and hosts
// Nodes are found by what ranks see. No directory gets its name before all are complete. A node
// that fails then keeps its old one: the error says so, a restore finds two saves and refuses them
// (`mismatch`), and the next save repairs it. A disk that shows one rank the directory of another
// one late, as its own, is `conflict`, and nothing is published.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tessera/dtype.h"

namespace [[gnu::visibility("default")]] tessera {

// The flat parameter of one module that FSDP1 wraps.
struct FlatUnit {
  std::string path;                // of the module, without wrappers; the root's is empty
  std::vector<std::string> names;  // of its parameters, whole and without wrappers, in order
};

// A mesh in which ranks hold copies of the model: rank r has the same part as r + N / copies of N.
struct OlmoMesh {
  int copies = 2;
  std::string device = "cpu";  // torch's name of its type: "cpu", "cuda"
};

struct OlmoSave {
  // The text of config.yaml, which is written last. Empty: one line that names the checkpointer.
  std::string config = {};
  // Of olmo_full: model and optimizer become .safetensors with OLMo's names instead of .pt.
  bool safetensors = false;
  // Of olmo_legacy: tensors become the DTensors of this mesh, which OLMo restores in a hybrid mesh
  // of the same size and nowhere else. None: ShardedTensors over all ranks.
  std::optional<OlmoMesh> mesh = {};
  // The rest is of olmo_local alone. All modules that FSDP1 wraps, the root first, in the order of
  // named_modules. The parameters of one lie one after another in its flat parameter.
  std::vector<FlatUnit> units = {};
  // As FSDP1's use_orig_params: whether parameters begin at multiples of 16 bytes.
  bool orig_params = true;
  // The element type whose size that alignment counts in; none: that of the parameters.
  std::optional<DType> aligned_as = {};
};

}  // namespace tessera
