// ScheduleEntry: what the schedule keeps of one unit: its root, what the user asked for, and where
// the unit is in the pass that is under way.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <torch/types.h>

#include "comm/whereabouts.h"
#include "fsdp/step/forward_order.h"
#include "fsdp/step/profiler_range.h"
#include "fsdp/step/unit_inputs.h"
#include "fsdp/unit/unit.h"

namespace tessera::detail {

class Root;

struct ScheduleEntry final : UnitSchedule {
  [[nodiscard]] bool is_quiet() const override;

  // Between its last backward and its next forward.
  [[nodiscard]] bool stays_gathered() const noexcept { return is_kept || pinned; }

  std::shared_ptr<Root> root;  // null until the first forward
  int id = 0;                  // place in the root's list, the same on every rank

  // Wishes of the user.
  bool pinned = false;                 // unshard() was called: it stays gathered until reshard()
  bool sync_gradients = true;          // its backward reduces; otherwise the gradients are kept
  bool begins_step = true;             // of the next forward, for DistributedDataParallel
  bool sync_replicas = true;           // a reduction goes over the copies too
  bool unshard_in_backward = true;     // its backward needs the parameters
  bool uneven_micro_batches = false;   // ranks may differ in backwards that do not reduce
  std::optional<int> reduction_limit;  // buffers of reductions at once
  std::uint64_t keep_bytes = 0;        // of units that stay gathered; of the root's own
  // Units to gather next.
  std::vector<std::weak_ptr<Unit>> forward_prefetch, backward_prefetch;

  // The pass that is under way.
  bool is_within_budget = false;         // keep_bytes of the root are enough for it
  bool is_kept = false;                  // it stays gathered from the last backward on
  std::size_t modules_to_run = 0;        // of several modules; 0: none was called yet
  int backwards_due = 0;                 // forwards whose backward has not come yet
  std::weak_ptr<Unit> next_in_backward;  // whose forward ended before this one's

  bool has_warned_of_views = false;
};

// Every unit gets its entry when it is made (wrap/shard_module.cpp).
[[nodiscard]] inline ScheduleEntry& entry_of(const Unit& unit) {
  return static_cast<ScheduleEntry&>(unit.schedule());
}

// Root: the units of one model, in step with each other through forward and backward.
//
// It decides when a unit gathers, frees and reduces; docs/design/schedule.md draws it. All
// decisions follow from the order of calls, which is the same on every rank, so collectives match
// without talk. One thread a rank: a Root is not shared between threads, but for the engine's: it
// runs the hooks of results on the CPU and on a device at the same time.

// One call of the outermost module: which units its graph went through, in the order their forwards
// ended. Backward meets them in reverse. Kept alive by the graph's hooks.
struct Pass {
  std::vector<std::weak_ptr<Unit>> order;
};

class Root : public std::enable_shared_from_this<Root> {
 public:
  // Joins the units at and below `top`'s module, also those that were called by themselves before.
  // Throws `invalid_argument` when one of them belongs to a root of modules elsewhere, or to one
  // that has something under way.
  static std::shared_ptr<Root> make(Unit& top);

  // Forward -------------------------------------------------------------------------------------
  void enter(Unit& unit, const std::vector<at::Tensor*>& inputs);
  void leave(Unit& unit, const std::vector<at::Tensor*>& results);
  // How many calls are under way.
  [[nodiscard]] std::size_t depth() const noexcept { return stack_.size(); }
  // The calls above `depth` were left by an exception. Whoever called them may catch it and go on;
  // when nobody is left, the step has failed.
  void fail(std::size_t depth) noexcept;
  // Neither in a forward nor in a backward.
  [[nodiscard]] bool is_quiet() const noexcept { return stack_.empty() && !in_backward_; }
  // Nor has it anything under way, and no exception ended what it did last.
  [[nodiscard]] bool is_at_rest() const noexcept {
    return is_quiet() && !failed_ && reducing_.empty();
  }

  // Waits for what is under way, forgets gradients and frees everything.
  void abandon_step();

  // False: reductions stay under way when backward returns.
  bool is_last_backward = true;

  [[nodiscard]] std::vector<std::shared_ptr<Unit>> units() const;

 private:
  // A call under way.
  struct Call {
    Unit* unit;
    std::unique_ptr<Range> range;  // of the profiler, around the module's forward
    bool is_due = false;           // counted in the unit's backwards_due
    UnitInputs inputs = {};
  };

  void take(std::vector<std::shared_ptr<Unit>> units);
  // Tells other ranks where this one is, should they do something else (comm/whereabouts.h).
  void tell(const std::string& where, const Unit* unit = nullptr) const;
  void check_usable() const;
  void begin_pass();
  void end_pass();
  void end_pass_of(Unit& unit) const;
  [[nodiscard]] static bool begins(Unit& unit);
  void make_whole(Unit& unit);
  static void prefetch(const std::shared_ptr<Unit>& unit, const RangeName& name);
  static void prefetch(const std::vector<std::weak_ptr<Unit>>& units, const RangeName& name);
  void prefetch_from(const Unit& unit);
  void prefetch_forward(const Unit& unit);
  void prefetch_before(const Unit& unit);
  static void prefetch_backward(const Unit& unit, const RangeName& name);
  [[nodiscard]] UnitInputs inputs_of(Unit& unit, const std::vector<at::Tensor*>& inputs);
  void end_call_of(Unit& unit);
  void close_to(std::size_t depth);
  static void free_after_forward(Unit& unit);
  void attach_to_results(Unit& unit, const UnitInputs& inputs,
                         const std::vector<at::Tensor*>& results);
  void await_backward(Unit& unit, const std::vector<at::Tensor>& watched);
  void watch_result(Unit& unit, const at::Tensor& result);
  void choose_kept(const std::vector<std::shared_ptr<Unit>>& all) const;
  [[nodiscard]] bool frees_after_forward(const Unit& unit) const;
  [[nodiscard]] static bool frees_after_backward(const Unit& unit);
  [[nodiscard]] bool is_outermost(const Unit& unit) const;
  static void free_outdated(const std::vector<std::shared_ptr<Unit>>& all);
  // For which of `units` it holds on any rank of those that train them, which may be others for
  // each. Collective.
  [[nodiscard]] static std::vector<bool> on_any_rank(
      const std::vector<std::shared_ptr<Unit>>& units, std::vector<bool> here);
  [[nodiscard]] bool is_training() const;  // the model; one rank may evaluate alone
  void prepare_inputs(const Unit& unit, const std::vector<at::Tensor*>& inputs) const;
  [[nodiscard]] bool casts_inputs(const Unit& unit) const;
  void cast_results(const Unit& unit, const std::vector<at::Tensor*>& results) const;
  [[nodiscard]] std::size_t reduction_limit() const;
  // The number of the training pass, the same on all ranks that did the same; travels with
  // gradients.
  [[nodiscard]] std::uint32_t pass_number(const Unit& unit) const;

  void before_backward(Unit& unit, const Pass& pass, std::size_t index, std::uint32_t version);
  void after_backward(Unit& unit);
  // Whether a backward ended with an exception.
  [[nodiscard]] bool has_lost_backward() const { return in_backward_ && backward_.expired(); }
  void begin_backward();
  void finish_backward();
  void reduce_or_keep(Unit& unit);
  void reduce_left();
  [[nodiscard]] std::vector<std::shared_ptr<Unit>> units_with_left_gradients();
  void reduce(Unit& unit);
  void finish_oldest_reduction();

  std::vector<std::weak_ptr<Unit>> units_;  // pre-order of modules; the first is the root's own
  std::shared_ptr<StoragePool> pool_ = std::make_shared<StoragePool>();
  std::vector<Call> stack_;                        // innermost last
  std::shared_ptr<Pass> pass_;                     // of the forward under way
  std::vector<std::weak_ptr<Unit>> entered_;       // units in the order this forward entered them
  std::vector<std::weak_ptr<Unit>> last_entered_;  // and the one before: what to prefetch
  ForwardOrder order_;                             // of the first training pass
  // The place of the thread that called the model last. Backward on a device runs on another one.
  std::shared_ptr<Place> place_ = place_of_thread();
  // Oldest first. Not owned: units own the root, and the mesh whose connections end with them.
  std::deque<std::weak_ptr<Unit>> reducing_;
  std::int64_t steps_ = 0;                // passes with gradients
  std::uint32_t passes_ = 0;              // of those in training, since the last reset
  std::uint32_t backwards_ = 0;           // likewise
  std::uint32_t reducing_backwards_ = 0;  // likewise, that reduced something
  std::uint32_t resets_ = 0;
  bool leaves_gradients_ = false;  // backwards did since the last that reduced those of all units
  std::recursive_mutex backward_turn_;  // held by a hook; an optimizer in it may backward again
  bool in_backward_ = false;
  // The backward under way, while it lives: nobody tells when an exception has ended it.
  std::weak_ptr<const char> backward_;
  bool failed_ = false;
};

}  // namespace tessera::detail
