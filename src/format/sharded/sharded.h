// The parts that one rank of N saved of tensors that all of them share (checkpoint-rows F-04,
// F-05): ShardedTensors, DTensors and FSDP1's flat parameters, as the values that a torch.save file
// holds. Each rank's part becomes pieces of the whole tensor; putting the ranks together is the
// caller's. docs/formats/rank-files.md and docs/formats/flat-parameters.md have the bytes.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tessera/layout.h"
#include "tessera/value.h"

namespace tessera::sharded {

// The rank whose file it is.
struct Rank {
  int rank = 0;
  int world = 1;  // number of ranks whose files are there
};

// Replaces every ShardedTensor and DTensor below `tree` by a tensor leaf of the global shape and
// dtype (`Tensor::sharded`), whose pieces are the ones that this rank holds: none, where it holds
// no elements. Nodes of `tree` are changed in place; it may be replaced itself. Throws `corrupt`
// for a tensor that says it is of another rank or of fewer ranks than there are files, and for
// shards that do not fit; `incomplete` when it is of more ranks; `unsupported` for placements that
// hold no part of the values (Partial).
void resolve(Value& tree, const Rank& rank);

// The same for one call while a pickle is read, so that its arguments need no memory when the rest
// is. What it does not take is left for `resolve`, which says why.
class Rebuilder {
 public:
  explicit Rebuilder(Rank rank) : rank_(rank) {}

  // Whether `callable(*arguments)` is such a tensor; `result` is the leaf then.
  bool operator()(const Value& callable, const Value& arguments, Value& result);
  // As `world_of` says of the first tensor that was taken.
  [[nodiscard]] std::optional<int> world() const { return world_; }

 private:
  Rank rank_;
  bool any_ = false;
  std::optional<int> world_;
};

// The size of the first ShardedTensor or DTensor of which `tree`, one rank's file, holds a part and
// not the whole; none: it holds all of each, or only what is not known here.
[[nodiscard]] std::optional<Shape> partly_held(const Value& tree);
// Replaces each by what the file holds of it: its local tensor, or a list of them. Nodes of `tree`
// are changed in place; it may be replaced itself.
void keep_local(Value& tree);

// The number of ranks that the first ShardedTensor or DTensor below the dicts of `tree` says it is
// of; none: no such tensor says one. A DTensor knows no more than the ranks of its mesh, which may
// be some of all.
[[nodiscard]] std::optional<int> world_of(const Value& tree);

// A flat parameter: this rank's shard of one or more parameters, one after another.
struct FlatHandle {
  Tensor data;                      // one-dimensional, dense
  std::vector<FlatMember> members;  // in the order of the flat parameter
  std::string module;  // whose parameters they are, without FSDP's wrappers; the root: ""
  Value geometry;      // what must be the same on all ranks
};

// The flat parameters of a `model/rank{r}.pt` (checkpoint-rows O-70), in the file's order. Both
// encodings are read:
// `_shard_param_infos`, and `_shard_indices` with `_shard_param_offsets` of torch up to 2.0.
// Elements of the shard that belong to no parameter are padding: those at its end that
// `_shard_numel_padded` counts must be zeros, others (42 where parameters are aligned) are not
// looked at. Throws `corrupt`.
[[nodiscard]] std::vector<FlatHandle> flat_handles(const Value& model);

// The piece of `tensor`'s elements `range` that lies in `data` from element `offset` on.
[[nodiscard]] Piece flat_piece(const Tensor& data, const FlatRange& range, std::int64_t offset,
                               int rank);

// A parameter's name without what FSDP puts between modules, every "_fsdp_wrapped_module."
// (checkpoint-rows O-41; a name that only ends in the word keeps it, OQ-14).
[[nodiscard]] std::string clean_name(std::string name);
// The reverse: `name` with that word behind each module around it that `is_wrapped`; the path of
// the root is empty.
[[nodiscard]] std::string wrapped_name(
    const std::string& name, const std::function<bool(const std::string& module)>& is_wrapped);

}  // namespace tessera::sharded
