// What a state of parts brings to a model: planned and checked first, then moved.
#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "fsdp/unit/unit.h"
#include "tessera/value.h"

namespace tessera::detail {

// Whether a state and a module must have the same names. Of a partial state the module takes what
// it has, and keeps the rest.
enum class Names : std::uint8_t { same, partial };

// Those of flat arrays: a rank holds other parts of them than chunks of rows, so their sharded kind
// is gathered.
[[nodiscard]] std::vector<std::shared_ptr<Unit>> units_without_chunks(
    const torch::nn::Module& module);

class ShardedLoad {
 public:
  // `state`: by the module's names, each rank's chunks. Throws `mismatch` naming an entry that is
  // missing, too many, or of another shape or part. Local.
  ShardedLoad(const torch::nn::Module& module, const Value& state, Names names);
  // The same for this rank's parts in `mine`, a tree over the memory that they are copied to.
  ShardedLoad(const Value& mine, const Value& state);
  // Collective if there are units without chunks. Of a partial state all ranks must then have the
  // same names.
  void apply() const;

 private:
  struct Copy {
    at::Tensor to, from;
  };
  using Chunks =
      std::unordered_map<const c10::TensorImpl*, at::Tensor>;  // undefined: no part of it
  void plan(const std::string& name, const Tensor& mine, const Value& given);
  void take_chunks(const Unit& unit) const;
  [[nodiscard]] at::Tensor joined_chunks(const Unit& unit, const UnitLayout& rows) const;

  std::vector<Copy> copies_;
  std::vector<std::shared_ptr<Unit>> units_;  // without chunks
  Chunks chunks_;                             // of their parameters, by the module's tensor
};

}  // namespace tessera::detail
