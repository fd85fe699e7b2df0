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
#include "fsdp/unit/unit_buffers.h"
#include "fsdp/unit/unit_changes.h"
#include "fsdp/unit/unit_schedule.h"
#include "fsdp/unit/whole_parameters.h"
#include "tessera/detail/slot.h"
#include "tessera/mesh.h"
#include "tessera/parameter.h"
#include "tessera/pytorch/state_dict.h"
#include "tessera/shard_options.h"
#include "tessera/trace.h"
#include "torch/mesh_state.h"

namespace tessera::detail {

class BucketReducer;

// Throws unless gradients can be divided by it.
void require_divide_factor(double factor);
// Throws for what cannot be a unit of `spec`, before anything of it is touched. Parameters may
// still be without data.
void require_takeable(const std::vector<at::Tensor>& parameters, const UnitSpec& spec);
// Then they may not.
void require_data(const std::vector<at::Tensor>& parameters, torch::Device device);

class Unit : public ParameterHome, public MeshUnit, public std::enable_shared_from_this<Unit> {
 public:
  // Takes over `parameters` of `modules` (whole, the same shapes on every rank; require_takeable).
  // Nothing is taken when it throws. Collective.
  Unit(std::vector<UnitModule> modules, const UnitSpec& spec,
       const std::vector<at::Tensor>& parameters);

  // The state that the schedule keeps of it; set once, before the unit is used.
  void set_schedule(std::unique_ptr<UnitSchedule> schedule) { schedule_ = std::move(schedule); }
  [[nodiscard]] UnitSchedule& schedule() const { return *schedule_; }

  // Who it is -----------------------------------------------------------------------------------
  // Its module, of several the first one.
  [[nodiscard]] std::shared_ptr<torch::nn::Module> module() const {
    return modules_.front().module.lock();
  }
  [[nodiscard]] std::vector<std::shared_ptr<torch::nn::Module>> modules() const;  // that are alive
  [[nodiscard]] bool is_dead() const override;                                    // none is
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
  // The name of a parameter, below the root.
  [[nodiscard]] std::string param_name(std::size_t index) const;
  void set_name(std::string name);  // of the module below the root
  [[nodiscard]] torch::Device device() const noexcept { return device_; }  // that it computes on
  // The ranks that share the parameters.
  [[nodiscard]] Mesh mesh() const { return mesh_of(mesh_); }
  // All that train together: with copies more than those.
  [[nodiscard]] Mesh all_ranks() const { return mesh_of(all_ranks_); }
  // Throws in a child of fork(), whose parent has the mesh and all that is under way in it.
  void require_own_mesh() const { static_cast<void>(all_ranks().group()); }
  [[nodiscard]] bool is_sharded() const noexcept { return is_sharded_; }
  // Nor is it without parameters.
  [[nodiscard]] bool has_shards() const noexcept { return store_ != nullptr; }
  // Sharded as one tensor for all its parameters: FSDP1 without use_orig_params.
  [[nodiscard]] bool is_flat() const noexcept { return is_sharded_ && geometry_ == Geometry::flat; }
  // Sharded, with copies.
  [[nodiscard]] bool is_hybrid() const noexcept { return is_hybrid_; }
  [[nodiscard]] Geometry geometry() const noexcept { return geometry_; }
  // It keeps to FSDP1's rules, whatever its geometry.
  [[nodiscard]] bool is_fsdp1() const noexcept { return flavour_ == Flavour::fsdp1; }
  [[nodiscard]] bool leaves_out_empty() const noexcept override {
    return is_sharded_ && is_fsdp1() && geometry_ == Geometry::flat_original;
  }
  [[nodiscard]] const std::vector<UnitParam>& params() const noexcept { return params_; }
  [[nodiscard]] std::vector<UnitParam>& params() noexcept { return params_; }
  [[nodiscard]] const ShardOptions& options() const noexcept { return options_; }
  [[nodiscard]] ShardOptions& options() noexcept { return options_; }
  [[nodiscard]] bool casts_root_inputs() const noexcept { return casts_root_inputs_; }
  [[nodiscard]] UnitBuffers& buffers() noexcept { return buffers_; }
  StateDictOptions state_dict_options;
  bool has_warned_of_forgotten = false;
  // What is done is recorded there, when there is one.
  std::shared_ptr<std::vector<TraceEvent>> trace;
  void note(TraceStep step) const;

  // The part that this rank holds of parameter `index`: its elements as a view of the shard, and
  // which they are: the first row, or with flat geometries the first element. Only when sharded.
  [[nodiscard]] at::Tensor held(std::size_t index) const { return store_->local(index); }
  [[nodiscard]] std::int64_t held_from(std::size_t index) const;
  // The part that each rank of mesh() holds of the parameter.
  [[nodiscard]] Placement placement_of(std::size_t index) const;
  [[nodiscard]] const UnitLayout& layout() const { return store_->layout(); }

  // Parameters ----------------------------------------------------------------------------------
  [[nodiscard]] ParamState param_state() const noexcept { return param_state_; }
  // Neither gathered nor on its way.
  [[nodiscard]] bool is_away() const noexcept {
    return param_state_ != ParamState::gathering && param_state_ != ParamState::full;
  }
  // Nothing unless it is away. `may_change`: others than the schedule run before the gather ends,
  // and may change the shard.
  void start_gather(bool may_change = false);
  void gather();  // until full, whatever the state
  void free();    // until sharded; nothing while it is shown
  // The same after forward: where the options say so a larger part stays here, and the next gather
  // takes fewer ranks, until free().
  void park();
  void share_pool(std::shared_ptr<StoragePool> pool) { pool_ = std::move(pool); }
  // Collectives of the user's own in the place of the transport's; only when sharded.
  void wrap_channel(const ChannelWrapper& wrap);
  // Follows what a user did to the tensors since, unless a pass is under way: follow_requires_grad
  // and adopt_replaced.
  void refresh() override;
  // Parameters are frozen and thawed through the module or through `local`: the other follows.
  void follow_requires_grad();
  // A pass with gradients begins.
  void note_trained();
  // Takes over what a user put in the place of tensors (fsdp-rows UO7), each rank its own part.
  // Throws for other shapes and for another device (fsdp-rows X29).
  void adopt_replaced();
  [[nodiscard]] bool is_replaced() const;
  [[nodiscard]] ShardChanges& changes() noexcept { return changes_; }
  [[nodiscard]] const ShardChanges& changes() const noexcept { return changes_; }

  // Whole, while nobody computes (tessera/pytorch/state_dict.h)
  // -----------------------------------------
  [[nodiscard]] const at::Tensor& shard() const { return store_->shard(); }
  [[nodiscard]] WholeParameters whole() const { return WholeParameters(*store_); }
  // The module's tensors are views of `array`, which whole().gather() gave; undefined: they stay
  // without data. Until hide(). `keeps`: what changes in them is this rank's shard, too.
  void show(const at::Tensor& array, bool keeps = false);
  void hide();
  [[nodiscard]] bool shows() const;  // an array
  // Writes what was changed in the module's tensors into the shard; nothing unless they are shown
  // and kept. Elements that nobody changed there are the shard's, which loads and optimizers
  // change. Throws for tensors that were replaced by ones of another shape.
  void keep_shown();
  // It is in evaluation and computes in its own dtype then (fsdp-rows MP3): shown whole from the
  // beginning of its forward to its end.
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
  // Whether a backward of this pass went through it with create_graph.
  void note_graph_of_backward(bool has_graph) noexcept { has_graph_of_backward_ = has_graph; }
  // Nothing when collecting already. The unit puts its own number in `plan.id`.
  void enter_backward(BackwardPlan plan);
  // Throws `unsupported` when the backward that begins captures a parameter's gradient.
  void require_accumulated() const;
  // The same when what stands for kept gradients was changed otherwise than by zeroing it.
  void require_kept_untouched() const;
  // Throws `invalid_argument` where gradients that stand together in grad() forbid it.
  void require_may_set(const AverageRules& rules) const;
  void set_rules(AverageRules rules);
  [[nodiscard]] AverageRules rules() const { return reducer_ ? reducer_->rules() : AverageRules(); }
  // Before the first forward; once.
  void set_comm_hook(CommHook hook);
  // Sends the gradients of `full` off to be averaged.
  void start_reduce();
  void advance_reduce();
  // Until the average is in local.grad().
  void finish_reduce();
  // Leaves the gradients whole on this rank, for a later reduction.
  void keep_gradients();
  // Earlier backwards left some that no reduction has taken along, or, of one `over_copies`, that
  // were not summed over the copies.
  [[nodiscard]] bool has_left_gradients(bool over_copies) const noexcept {
    return has_kept_ || (over_copies && has_waiting_);
  }
  void forget_gradients();
  // Throws when reductions that have ended were not of the same on all ranks (GradReducer::look).
  void look_at_reductions(GradReducer::Look how);
  // full.grad() is a stand-in wherever local.grad() is there while nobody collects gradients, so
  // that module->zero_grad() works and an optimizer on the wrong tensors fails loudly. FSDP1's
  // units forget with local.grad() what they keep for a later reduction, so while they keep
  // something it is there too.
  void show_gradients();
  void hide_gradients();  // and forget those whose stand-in was taken away

  std::uint64_t gathers = 0;
  std::uint64_t reductions = 0;
  [[nodiscard]] std::uint64_t gathered_bytes() const;  // now
  [[nodiscard]] std::uint64_t whole_bytes() const;     // while it is gathered
  [[nodiscard]] std::uint64_t shard_bytes() const;
  [[nodiscard]] std::int64_t element_count() const noexcept { return element_count_; }

 private:
  void take_modules(std::vector<UnitModule> modules,
                    const std::unordered_set<const torch::nn::Module*>& ignored);
  void make_store(const UnitSpec& spec, const std::vector<at::Tensor>& parameters);
  [[nodiscard]] std::vector<at::Tensor> make_locals(
      const std::vector<at::Tensor>& parameters) const;
  void drop_gathered();
  void forbid_access();
  void open_parking(const UnitSpec& spec, const std::vector<Shape>& shapes);
  void make_reducer(const UnitSpec& spec, at::ScalarType parameter_type);
  [[nodiscard]] std::unique_ptr<BucketReducer> make_buckets(const UnitSpec& spec,
                                                            at::ScalarType dtype, double divisor);
  void make_dead_gradients();
  void show_kept(std::size_t param);
  enum class Shown : std::uint8_t { kept, taken_away, changed };
  // The fate of what was shown; only where something was shown.
  [[nodiscard]] Shown shown(std::size_t param) const;
  void drop_taken_away();
  void require_collecting() const;
  void adopt_local(std::size_t param);
  void adopt_full(std::size_t param);
  void require_device(const at::Tensor& tensor, const at::Tensor& home, std::size_t param) const;
  void require_shape(const at::Tensor& tensor, const at::Tensor& home, std::size_t param) const;
  // `tensor` can be taken over in the place of `home`.
  void require_home(const at::Tensor& tensor, const at::Tensor& home, std::size_t param) const;

  struct Member {
    std::weak_ptr<torch::nn::Module> module;
    SlotMaker slot_maker;
  };
  std::unique_ptr<UnitSchedule> schedule_;
  std::vector<Member> modules_;
  std::unordered_set<const torch::nn::Module*> ignored_modules_;
  std::shared_ptr<MeshState> mesh_, all_ranks_, copies_;  // what is below has their transports
  torch::Device device_;
  std::uint32_t number_;  // of the units that were made over its mesh; the same on every rank
  bool is_sharded_;
  bool is_hybrid_;
  bool casts_root_inputs_;
  bool is_shown_in_own_type_ = false;
  at::Tensor kept_;  // this rank's part of what is shown and kept, when it was last the shard's
  Geometry geometry_;
  Flavour flavour_;
  ShardOptions options_;
  std::string type_;
  std::string name_;
  // Texts of errors when parameters are used while they are not there.
  std::string bypass_text_, graph_text_;
  bool has_graph_of_backward_ = false;
  std::int64_t element_count_ = 0;
  std::vector<UnitParam> params_;
  UnitBuffers buffers_;
  bool has_comm_hook_ = false;
  bool has_kept_ = false;                 // gradients on this rank
  bool has_waiting_ = false;              // sums over the ranks that share the parameters alone
  bool over_copies_ = true;               // the reduction of the backward that began last
  std::unique_ptr<ParamStore> store_;     // null: parameters stay where they are, or there are none
  ShardChanges changes_{nullptr};         // of the store, when there is one
  std::unique_ptr<GradReducer> reducer_;  // null: no parameters
  BucketReducer* buckets_ = nullptr;      // the reducer, when parameters stay where they are
  at::Tensor dead_;                       // the storage behind dead_grad
  std::shared_ptr<StoragePool> pool_;     // of the root, one of its own until there is one
  ParamState param_state_ = ParamState::sharded;
  GradState grad_state_ = GradState::idle;
};

}  // namespace tessera::detail
