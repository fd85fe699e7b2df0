// Unit: parameters that are gathered, freed and reduced together, or, where every rank keeps them
// whole, only reduced together.
//
// A unit knows its own states and nothing of order, hooks or other units: that is Root's.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "fsdp/plan/schedule.h"
#include "fsdp/unit/grad_reducer.h"
#include "fsdp/unit/param_store.h"
#include "fsdp/unit/storage_pool.h"
#include "tessera/detail/slot.h"
#include "tessera/mesh.h"
#include "tessera/parameter.h"
#include "tessera/shard_options.h"
#include "tessera/state_dict.h"
#include "tessera/trace.h"

namespace tessera::detail {

class BucketReducer;
class Root;

class Unit : public ParameterHome, public std::enable_shared_from_this<Unit> {
 public:
  // Takes over `parameters` of `modules` (whole, the same shapes on every rank). Collective.
  Unit(std::vector<UnitModule> modules, const UnitSpec& spec,
       const std::vector<at::Tensor>& parameters);

  // Buffers of its module that are no other unit's.
  void take_buffers(std::vector<at::Tensor> buffers) { buffers_ = std::move(buffers); }
  // To the mesh's device and the dtype asked for.
  void place_buffers();
  // Those that were cast, in their own dtype or in the one asked for.
  void use_own_buffers(bool own);
  // The dtype that each buffer had before; those that were not cast are not listed.
  [[nodiscard]] const std::vector<std::pair<at::Tensor, at::ScalarType>>& cast_buffers() const {
    return cast_buffers_;
  }

  // Who it is -----------------------------------------------------------------------------------
  // Its module, of several the first one.
  [[nodiscard]] std::shared_ptr<torch::nn::Module> module() const {
    return modules_.front().module.lock();
  }
  [[nodiscard]] std::vector<std::shared_ptr<torch::nn::Module>> modules() const;  // that are alive
  [[nodiscard]] std::size_t module_count() const noexcept { return modules_.size(); }
  [[nodiscard]] bool has_module(const torch::nn::Module* module) const;
  // A holder for the slot of a Sequential; null when none can hold the module.
  [[nodiscard]] std::unique_ptr<torch::nn::AnyModulePlaceholder> make_slot(
      const torch::nn::Module* module) const;
  // Modules at and below its own whose parameters and buffers no unit takes.
  [[nodiscard]] const std::unordered_set<const torch::nn::Module*>& ignored_modules() const {
    return ignored_modules_;
  }
  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  // Of a parameter, below the root.
  [[nodiscard]] std::string param_name(std::size_t index) const;
  void set_name(std::string name);  // of the module below the root
  [[nodiscard]] torch::Device device() const noexcept { return device_; }  // that it computes on
  // The ranks that share the parameters; the unit itself does not keep its meshes alive.
  [[nodiscard]] Mesh mesh() const;
  // All that train together: with copies more than those.
  [[nodiscard]] Mesh all_ranks() const;
  [[nodiscard]] bool is_sharded() const noexcept { return is_sharded_; }
  // Sharded, with copies.
  [[nodiscard]] bool is_hybrid() const noexcept { return is_hybrid_; }
  [[nodiscard]] Geometry geometry() const noexcept { return geometry_; }
  [[nodiscard]] const std::vector<UnitParam>& params() const noexcept { return params_; }
  [[nodiscard]] std::vector<UnitParam>& params() noexcept { return params_; }
  [[nodiscard]] const ShardOptions& options() const noexcept { return options_; }
  [[nodiscard]] ShardOptions& options() noexcept { return options_; }
  [[nodiscard]] bool casts_root_inputs() const noexcept { return casts_root_inputs_; }
  std::shared_ptr<Root> root;  // null until the first forward
  bool pinned = false;         // unshard() was asked for: stays gathered until reshard()
  bool is_kept = false;        // stays gathered from the last backward on
  bool sync_gradients = true;
  bool sync_replicas = true;  // of what is reduced: over the copies too
  bool unshard_in_backward = true;
  StateDictOptions state_dict_options;
  // What to gather next, when the user has said so.
  std::vector<std::weak_ptr<Unit>> forward_prefetch, backward_prefetch;
  std::weak_ptr<Unit> next_in_backward;  // whose forward ended before this one's
  int id = 0;                            // place in the root's list, the same on every rank
  std::optional<int> reduction_limit;    // buffers of reductions at once, when the user has said so
  bool has_warned_of_views = false;
  bool has_warned_of_forgotten = false;
  std::size_t modules_to_run = 0;  // of several, in this pass; 0: none was called yet
  int backwards_due = 0;           // forwards whose backward has not come yet
  // What is done is recorded there, when there is one.
  std::shared_ptr<std::vector<TraceEvent>> trace;
  void note(TraceStep step) const;

  // What this rank holds of parameter `index`: its elements as a view of the shard, and which they
  // are: the first row, or with flat geometries the first element. Only when sharded.
  [[nodiscard]] at::Tensor held(std::size_t index) const { return store_->local(index); }
  [[nodiscard]] std::int64_t held_from(std::size_t index) const;
  [[nodiscard]] const UnitLayout& layout() const { return store_->layout(); }

  // Parameters ----------------------------------------------------------------------------------
  [[nodiscard]] ParamState param_state() const noexcept { return param_state_; }
  void start_gather();  // nothing unless sharded
  void gather();        // until full, whatever the state
  void free();          // until sharded, whatever the state
  // The same after forward: where the options say so a larger part stays here, and the next gather
  // takes fewer ranks, until free().
  void park();
  void share_pool(std::shared_ptr<StoragePool> pool) { pool_ = std::move(pool); }
  // Collectives of the user's own in the place of the transport's; only when sharded.
  void wrap_channel(const ChannelWrapper& wrap);
  // What a user did to the tensors since, unless a pass is under way: follow_requires_grad and
  // adopt_replaced.
  void refresh() override;
  // Parameters are frozen and thawed through the module or through `local`: the other follows.
  void follow_requires_grad();
  // Takes over what a user put in the place of tensors (spec UO7), each rank its own part. Throws
  // for other shapes and for another device (X29).
  void adopt_replaced();
  [[nodiscard]] bool is_replaced() const;
  // The shard may have changed since it was gathered: by an operator, or its memory was handed out.
  [[nodiscard]] bool is_stale() const {
    return handed_out_ || shard_version() != gathered_version_;
  }
  // What the shard holds, until it is gathered again: torch::optim::SGD changes it through data(),
  // which leaves no version behind. On the CPU; elsewhere it is copied there.
  void remember_shard();
  [[nodiscard]] bool is_remembered() const noexcept { return remembered_.has_value(); }
  // On this rank, since it was remembered.
  [[nodiscard]] bool has_changed() const;
  // Somebody may write to the shard's memory past libtorch.
  void hand_out() noexcept { handed_out_ = true; }
  // Changes when the shard changes by an operation that autograd knows of (an optimizer's step).
  [[nodiscard]] std::uint32_t shard_version() const;

  // Whole, while nobody computes (tessera/full_params.h) -----------------------------------------
  [[nodiscard]] const at::Tensor& shard() const { return store_->shard(); }
  // What every rank gives, one after the other. Collective.
  [[nodiscard]] at::Tensor exchange(const at::Tensor& mine) const;
  // All parameters out of what every rank gives, laid out as its shard: one-dimensional.
  // Collective.
  [[nodiscard]] at::Tensor gather_whole(const at::Tensor& mine) const;
  [[nodiscard]] at::Tensor whole_view(const at::Tensor& whole, std::size_t param) const;
  // The sums over the ranks of what each gives. Collective.
  [[nodiscard]] at::Tensor gather_flags(const at::Tensor& mine) const;
  // Copies this rank's part of `whole` to `to`, laid out as the shard.
  void keep_own(const at::Tensor& whole, const at::Tensor& to) const;
  // The same from one whole parameter.
  void take_own(std::size_t param, const at::Tensor& whole, const at::Tensor& to) const;
  // The module's tensors are views of `whole`; undefined: they stay without data. Until hide().
  void show(const at::Tensor& whole);
  void hide();
  // It is in evaluation and computes in its own dtype then (spec MP3): shown whole from the begin
  // of its forward to the end.
  [[nodiscard]] bool computes_in_own_type() const;
  void show_own_type();
  void hide_own_type();  // nothing when it is not shown so

  // Gradients -----------------------------------------------------------------------------------
  [[nodiscard]] GradState grad_state() const noexcept { return grad_state_; }
  // From here on every gradient that reaches a parameter at another time is refused.
  void watch();
  void watch(std::size_t param);  // nothing when it is frozen or watched already
  // Its gradients may leave while its backward goes on: it is the only unit of its root.
  void allow_early_reduction(bool allowed);
  // Of the root's pass; nothing when collecting already.
  void enter_backward(std::uint32_t pass);
  // Throws `unsupported` when the backward that begins captures a parameter's gradient.
  void require_accumulated() const;
  void set_divide_factor(double factor);
  void set_reduce_hook(ReduceHook hook);
  // Before the first forward; once.
  void set_comm_hook(CommHook hook);
  // Sends the gradients of `full` off to be averaged.
  void start_reduce();
  void advance_reduce();
  // Until the average is in local.grad().
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
  [[nodiscard]] std::int64_t element_count() const noexcept { return element_count_; }

 private:
  void make_store(const UnitSpec& spec, const std::vector<at::Tensor>& parameters);
  void make_parking(const UnitSpec& spec, const std::vector<Shape>& shapes);
  void make_reducer(const UnitSpec& spec, at::ScalarType parameter_type);
  void make_dead_gradients();
  // `tensor` can be taken over in the place of `home`.
  void require_home(const at::Tensor& tensor, const at::Tensor& home, std::size_t param) const;

  struct Member {
    std::weak_ptr<torch::nn::Module> module;
    SlotMaker slot_maker;
  };
  std::vector<Member> modules_;
  std::unordered_set<const torch::nn::Module*> ignored_modules_;
  std::weak_ptr<MeshState> mesh_, all_ranks_;
  torch::Device device_;
  std::uint32_t number_;  // of the units that were made over its mesh; the same on every rank
  bool is_sharded_;
  bool is_hybrid_;
  bool casts_root_inputs_;
  bool is_shown_ = false;
  bool is_shown_in_own_type_ = false;
  bool has_own_buffers_ = false;  // of those that were cast, for a while
  bool handed_out_ = false;
  Geometry geometry_;
  ShardOptions options_;
  std::string type_;
  std::string name_;
  std::string bypass_text_;  // said when parameters are used while they are not there
  std::int64_t element_count_ = 0;
  std::vector<UnitParam> params_;
  std::vector<at::Tensor> buffers_;
  std::vector<std::pair<at::Tensor, at::ScalarType>> cast_buffers_;
  bool has_comm_hook_ = false;
  std::unique_ptr<ParamStore> store_;     // null: parameters stay where they are, or there are none
  std::unique_ptr<GradReducer> reducer_;  // null: no parameters
  BucketReducer* buckets_ = nullptr;      // the reducer, when parameters stay where they are
  at::Tensor dead_;                       // the storage behind dead_grad
  std::shared_ptr<StoragePool> pool_;     // of the root, one of its own until there is one
  std::uint32_t gathered_version_ = 0;    // of the shard, when it was last gathered
  std::optional<std::uint64_t> remembered_;  // digest of the shard as it was gathered
  ParamState param_state_ = ParamState::sharded;
  GradState grad_state_ = GradState::idle;
};

}  // namespace tessera::detail
