// Unit: parameters that are gathered, freed and reduced together.
//
// The module's own tensors (`full`) are permanent views of one storage, made once, so that
// autograd's accumulators and saved tensors never go stale. Freeing takes the storage's memory away
// and marks the storage so that any access throws; gathering gives it memory again. What the rank
// keeps is the flat shard, of which every `local` is a view.
//
// A unit knows its own states and nothing of order, hooks or other units: that is Root's.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/flat_layout.h"
#include "fsdp/schedule.h"
#include "fsdp/storage_pool.h"
#include "tessera/detail/slot.h"
#include "tessera/mesh.h"
#include "torch/transport.h"

namespace tessera::detail {

class Root;

struct UnitParam {
  at::Tensor full;   // the module's tensor
  at::Tensor local;  // this rank's rows, a leaf of the optimizer
  at::Tensor
      dead_grad;  // stands for a gradient that is in local.grad(): no bytes, throws on access
  FlatEntry place;
  bool mirrored = false;  // full.grad() is dead_grad
};

class Unit : public std::enable_shared_from_this<Unit> {
 public:
  // Takes over `parameters` (whole, the same shapes on every rank). Collective.
  Unit(std::shared_ptr<torch::nn::Module> module, const Mesh& mesh,
       std::vector<at::Tensor> parameters, std::optional<bool> reshard_after_forward);

  // Who it is -----------------------------------------------------------------------------------
  [[nodiscard]] std::shared_ptr<torch::nn::Module> module() const { return module_.lock(); }
  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  void set_name(std::string name);  // of the module below the root
  [[nodiscard]] Mesh mesh() const;  // the unit itself does not keep its mesh alive
  [[nodiscard]] const std::vector<UnitParam>& params() const noexcept { return params_; }
  [[nodiscard]] std::vector<UnitParam>& params() noexcept { return params_; }
  SlotMaker slot_maker;        // null when no Sequential can hold the module
  std::shared_ptr<Root> root;  // null until the first forward
  std::optional<bool> reshard_after_forward;
  bool pinned = false;  // unshard() was asked for: stays gathered until reshard()
  bool sync_gradients = true;
  int id = 0;             // place in the root's list, the same on every rank
  int backwards_due = 0;  // forwards whose backward has not come yet

  // Parameters ----------------------------------------------------------------------------------
  [[nodiscard]] ParamState param_state() const noexcept { return param_state_; }
  void start_gather();  // nothing unless sharded
  void gather();        // until full, whatever the state
  void free();          // until sharded, whatever the state
  void share_pool(std::shared_ptr<StoragePool> pool) { pool_ = std::move(pool); }
  // Changes when the shard changes by an operation that autograd knows of (an optimizer's step).
  [[nodiscard]] std::uint32_t shard_version() const;

  // Gradients -----------------------------------------------------------------------------------
  [[nodiscard]] GradState grad_state() const noexcept { return grad_state_; }
  // From here on every gradient that reaches a parameter at another time is refused.
  void watch();
  void enter_backward();  // nothing when collecting already
  // Sends the gradients of `full` off to be summed and forgets them there.
  void start_reduce();
  // Adds the average over the ranks to local.grad().
  void finish_reduce();
  // Leaves the gradients whole on this rank, for a later reduction.
  void keep_gradients();
  void forget_gradients();
  // While nobody collects gradients, full.grad() is a stand-in wherever local.grad() is there, so
  // that module->zero_grad() works and an optimizer on the wrong tensors fails loudly.
  void show_gradients();
  void hide_gradients();  // and forget those whose stand-in was taken away

  std::uint64_t gathers = 0;
  std::uint64_t reductions = 0;
  [[nodiscard]] std::uint64_t gathered_bytes() const;
  [[nodiscard]] std::uint64_t shard_bytes() const;
  [[nodiscard]] std::int64_t element_count() const noexcept;

 private:
  void take_over(const std::vector<at::Tensor>& parameters);
  void make_dead_gradients();
  void forbid_access();
  void allocate();
  [[nodiscard]] bool has_memory() const;
  void copy_shard(int rank, const at::Tensor& shard);
  void fill_slice(int rank, const std::vector<at::Tensor>& gradients, at::Tensor& slice) const;
  [[nodiscard]] at::Tensor gradient_of(const UnitParam& param) const;
  void check_same_unit(double sum_of_ids) const;

  std::weak_ptr<torch::nn::Module> module_;
  std::weak_ptr<MeshState> mesh_;
  int rank_ = 0;
  int world_ = 1;
  std::string type_;
  std::string name_;
  std::string bypass_text_;  // said when parameters are used while they are not there
  FlatLayout layout_;
  std::vector<UnitParam> params_;
  std::unique_ptr<Channel> channel_;   // null: a unit without parameters
  at::Tensor gathered_;                // one-dimensional, all parameters; memory only while full
  at::Tensor dead_;                    // the storage behind dead_grad
  std::vector<std::size_t> reducing_;  // the parameters whose gradients are under way
  std::shared_ptr<StoragePool> pool_;  // of the root, one of its own until there is one
  ParamState param_state_ = ParamState::sharded;
  GradState grad_state_ = GradState::idle;
};

}  // namespace tessera::detail
