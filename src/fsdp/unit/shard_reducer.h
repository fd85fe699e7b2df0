// ShardReducer: gradients of sharded parameters. Each rank gets the average of the part that it
// holds: a reduce-scatter over the ranks that share the parameters and, when there are other copies
// of them, a sum over the ranks that hold the same part.
#pragma once

#include <memory>
#include <vector>

#include "fsdp/unit/grad_reducer.h"
#include "fsdp/unit/param_store.h"
#include "tessera/shard_options.h"
#include "torch/transport.h"

namespace tessera::detail {

struct ShardReducerOptions {
  int shard_world = 1;                     // ranks that share the parameters
  Transport* replicas = nullptr;           // null: one copy only
  at::ScalarType dtype = at::kFloat;       // gradients travel in
  at::ScalarType kept_dtype = at::kFloat;  // averages are given in
  double divisor = 1;
  Geometry geometry = Geometry::rows;
  Flavour flavour = Flavour::fsdp2;
};

class ShardReducer final : public GradReducer {
 public:
  // Both outlive it.
  ShardReducer(std::vector<UnitParam>& params, ParamStore& store,
               const ShardReducerOptions& options);

  // Averages are elsewhere.
  [[nodiscard]] bool may_set(const AverageRules&) const override { return true; }
  void begin(const BackwardPlan& plan) override;
  bool arrived(std::size_t) override { return true; }
  bool start() override;
  void advance() override;
  void finish() override;
  void keep() override;
  void forget() override;
  [[nodiscard]] bool keeps(std::size_t param) const override { return kept_[param].defined(); }
  void drop_kept(std::size_t param) override { kept_[param] = at::Tensor(); }

 private:
  [[nodiscard]] bool is_fsdp1() const noexcept { return options_.flavour == Flavour::fsdp1; }
  [[nodiscard]] at::Tensor gradient_of(std::size_t param);
  void start_sum_beside(at::Tensor slices);
  void add_waiting();
  [[nodiscard]] std::vector<bool> travels() const;
  [[nodiscard]] std::vector<at::Tensor> take_gradients();
  void choose_slices(std::vector<std::size_t> travelling);
  [[nodiscard]] UnitLayout slices_of_travelling() const;
  [[nodiscard]] bool may_average() const;
  [[nodiscard]] at::Tensor whole_slices(const std::vector<at::Tensor>& gradients) const;
  [[nodiscard]] Channel::Fill fill_of(std::vector<at::Tensor> gradients) const;
  void reduce_by_hook(std::vector<at::Tensor> gradients);
  void finish_sum(const at::Tensor& sum);
  void give(const at::Tensor& average, const std::vector<bool>& present);
  void give_each(const at::Tensor& gradients, const std::vector<bool>& present);
  void drop_frozen_gradients();

  std::vector<UnitParam>& params_;
  ParamStore& store_;
  ShardReducerOptions options_;
  std::vector<std::size_t> travelling_;  // parameters whose gradients travel
  // Their places in a slice. A reduction keeps the layout that it began with.
  std::shared_ptr<const UnitLayout> slices_;
  std::vector<at::Tensor> kept_;  // [parameter] not yet reduced, in the dtype of reductions
  // [parameter] it required a gradient in a backward whose gradients are not yet reduced; the same
  // on every rank.
  std::vector<bool> owed_;
  BackwardPlan plan_;
  Reduced reduced_;  // by the last reduction
  bool under_way_ = false;
  bool averages_ = false;  // what is under way
  bool has_all_ = false;   // of the gradients that travel
  at::Tensor sum_;
  // Sums over the ranks that share the parameters which have not been summed over the copies yet.
  at::Tensor waiting_;
  Reduced waiting_for_;            // what they are
  double waiting_divided_by_ = 1;  // before they were summed
  // The tensors that the stream of sums works on until the stream that computes has waited for it.
  // Memory goes back to the latter.
  std::vector<at::Tensor> beside_;
  std::unique_ptr<PendingSum> over_replicas_;
};

}  // namespace tessera::detail
