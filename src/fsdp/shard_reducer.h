// ShardReducer: gradients of sharded parameters. Each rank gets the average of the part that it
// holds: a reduce-scatter over the ranks that share the parameters and, when there are other copies
// of them, a sum over the ranks that hold the same part.
#pragma once

#include <memory>
#include <vector>

#include "fsdp/grad_reducer.h"
#include "fsdp/param_store.h"
#include "tessera/shard_options.h"
#include "torch/transport.h"

namespace tessera::detail {

struct ShardReducerOptions {
  int ranks = 1;                      // that contribute: sharding times replicas
  int shard_world = 1;                // ranks that share the parameters
  Transport* replicas = nullptr;      // null: one copy only
  at::ScalarType dtype = at::kFloat;  // gradients travel in
  double divisor = 1;
  Geometry geometry = Geometry::rows;
};

class ShardReducer final : public GradReducer {
 public:
  // Both outlive it.
  ShardReducer(std::vector<UnitParam>& params, ParamStore& store,
               const ShardReducerOptions& options);

  void begin(bool, int id) override { id_ = id; }
  void arrived(std::size_t) override {}
  bool start() override;
  void advance() override;
  void finish() override;
  void keep() override;
  void forget() override;

 private:
  [[nodiscard]] at::Tensor gradient_of(std::size_t param);
  void choose_slices(std::vector<std::size_t> travelling);
  void fill(int rank, const std::vector<at::Tensor>& gradients, at::Tensor& slice) const;

  std::vector<UnitParam>& params_;
  ParamStore& store_;
  ShardReducerOptions options_;
  GradScale scale_;
  std::vector<std::size_t> travelling_;  // parameters whose gradients travel
  UnitLayout slices_;                    // of those: where they lie in a slice
  std::vector<at::Tensor> kept_;         // [parameter] not yet reduced, in the dtype of reductions
  int id_ = 0;                           // of the unit
  bool under_way_ = false;
  at::Tensor sum_;
  std::unique_ptr<PendingSum> over_replicas_;
};

}  // namespace tessera::detail
