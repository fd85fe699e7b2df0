// The DTensors of a `rank*.pt` that a hybrid mesh saved (checkpoint-rows F-04, O-60), as torch
// pickles them.
#pragma once

#include <string>

#include "tessera/layout.h"
#include "tessera/value.h"

namespace tessera::olmo {

// A mesh of two dimensions: rank r is number r / parts of those that hold part r % parts.
struct HybridMesh {
  int copies = 1;
  int parts = 1;
  std::string device = "cpu";  // torch's name of its type
};

// Makes the DTensors of one file. They share one mesh, as in torch.
//
// Torch puts two things into a mesh that depend on the process. A cached hash is left out: torch
// computes it when it is asked for. Names of process groups are those that torch counts out to a
// program whose first mesh this is, as OLMo's is: torch looks its groups up by them.
class DTensorMaker {
 public:
  DTensorMaker(int rank, const HybridMesh& mesh);

  // A tensor of `shape` whose rows the parts share as torch.chunk does. `local`: the tensor leaf
  // with this rank's rows, of which there may be none.
  [[nodiscard]] Value make(DType dtype, const Shape& shape, const Value& local) const;

 private:
  [[nodiscard]] Value mesh_of(int rank, const HybridMesh& mesh) const;
  [[nodiscard]] Value placements() const;
  [[nodiscard]] Value spec(DType dtype, const Shape& shape) const;

  // Objects and attribute names that are single in Python.
  Value hash_ = "_hash", dim_ = "dim", shape_ = "shape", stride_ = "stride";
  Value local_tensor_ = "_local_tensor", spec_ = "_spec", mesh_name_ = "mesh";
  Value placements_ = "placements", tensor_meta_ = "tensor_meta", shard_order_ = "shard_order";
  Value strided_ = "use_strided_shard_as_shard_order";
  Value layout_, mesh_;
};

}  // namespace tessera::olmo
