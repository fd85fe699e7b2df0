#include "fsdp/step/root.h"

#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <set>
#include <unordered_set>
#include <utility>

#include "base/log.h"
#include "comm/whereabouts.h"
#include "fsdp/unit/registry.h"
#include "tessera/error.h"
#include "torch/compat.h"
#include "torch/device.h"

namespace tessera::detail {
namespace {

// Only floating-point tensors are ever cast (fsdp-rows MP10).
void cast_floating(const std::vector<at::Tensor*>& tensors, at::ScalarType dtype) {
  for (auto* tensor : tensors) {
    if (tensor->defined() && tensor->is_floating_point()) *tensor = tensor->to(dtype);
  }
}

void move_to(torch::Device device, const std::vector<at::Tensor*>& tensors) {
  for (auto* tensor : tensors) {
    if (tensor->defined() && tensor->device() != device) *tensor = tensor->to(device);
  }
}

bool wants_gradient(const at::Tensor& tensor) {
  return tensor.defined() && tensor.requires_grad();
}

// A replay would read the addresses that parameters had in this pass, and exchange nothing.
void require_no_capture(const Unit& unit) {
  const auto device = unit.all_ranks().device();
  if (!is_accelerator(device) || !compat::is_capturing(device)) return;
  throw Error(ErrorCode::unsupported,
              "a graph is being captured on " + device.str() + ", and unit '" + unit.name() +
                  "' is called: a replay would read parameters where they no longer are. Capture "
                  "modules that have no parameters of a unit");
}

// The optimizer sees flat parameters of FSDP1's units or original ones, not both; a model is
// evaluated in one way (fsdp-rows X28, L36).
void require_homogeneous(const std::vector<std::shared_ptr<Unit>>& units) {
  std::set<bool> original, full_precision;
  for (const auto& unit : units) {
    if (!unit->is_sharded() || !unit->is_fsdp1()) continue;
    original.insert(unit->geometry() == Geometry::flat_original);
    full_precision.insert(unit->options().mixed_precision.full_precision_in_eval);
  }
  const auto require_one = [](const std::set<bool>& values, const std::string& name) {
    if (values.size() < 2) return;
    throw Error(ErrorCode::invalid_argument,
                "Expects one homogeneous value for " + name + " but got true and false");
  };
  require_one(original, "use_orig_params");
  require_one(full_precision, "full_precision_in_eval");
}

// The outermost unit comes first.
void require_budget_of_root(const std::vector<std::shared_ptr<Unit>>& units) {
  for (const auto& unit : units) {
    if (unit == units.front() || entry_of(*unit).keep_bytes == 0) continue;
    throw Error(ErrorCode::invalid_argument,
                "set_keep_gathered takes a model's outermost module, got one that is inside")
        .at_key(unit->name());
  }
}

// As FSDP2 does, once a unit.
void warn_of_view(Unit& unit) {
  if (!unit.is_sharded() || unit.is_fsdp1()) return;
  if (std::exchange(entry_of(unit).has_warned_of_views, true)) return;
  log_of_all(
      LogLevel::warning,
      "FSDP2-wrapped module ('" + unit.name() +
          "') returned a view tensor. An in-place op on this view (e.g., `x += y`) will silently "
          "drop the pre-backward hook and skip the all-gather, which can cause backward to fail or "
          "produce wrong gradients. Use out-of-place ops (`out = out + y`, not `out += y`) or "
          "`.clone()` the output before any in-place op.");
}

// A parameter, or another leaf that somebody keeps: the hook of a pass would stay on it for good.
// One that forward has just made is its caller's, who looks for its gradient.
bool lives_on(const at::Tensor& result) {
  return result.is_leaf() && result.use_count() > 1;
}

// A leaf that no device of the unit holds: its backward does not come to the unit.
bool is_elsewhere(const Unit& unit, const at::Tensor& result) {
  return result.is_leaf() && result.device() != unit.device();
}

bool inside_backward() {
  return torch::autograd::get_current_graph_task_id() >= 0;
}

const char* name_of_forward() {
  if (inside_backward()) return "the backward";
  return torch::GradMode::is_enabled() ? "the forward" : "a forward without gradients";
}

// `unit` can join those of `others`: no root has it yet, or one of these units alone, whose module
// was called before the model was.
void require_free(const std::string& name, const Unit& unit,
                  const std::unordered_set<const Unit*>& others) {
  if (!entry_of(unit).root) return;
  const auto same_root = entry_of(unit).root->units();
  if (!std::ranges::all_of(same_root,
                           [&](const auto& one) { return others.contains(one.get()); })) {
    throw Error(ErrorCode::invalid_argument,
                "FSDP state has already been lazily initialized for '" + name +
                    "': FSDP requires running forward through the root module first");
  }
  if (entry_of(unit).root->is_at_rest()) return;
  throw Error(ErrorCode::invalid_argument,
              "'" + name +
                  "' was called by itself and is in its forward or backward, or left it by an "
                  "exception; call tessera::abandon_step(model) on every rank to use the model");
}

}  // namespace

bool ScheduleEntry::is_quiet() const {
  return !root || root->is_quiet();
}

std::shared_ptr<Root> Root::make(Unit& top) {
  auto root = std::make_shared<Root>();
  const auto module = top.module();
  if (top.module_count() > 1) {
    throw Error(ErrorCode::invalid_argument,
                "FSDP requires a single root module but got the unit of " +
                    std::to_string(top.module_count()) + " modules that begins with " +
                    module->name() + ": make a unit of the module around them");
  }
  const auto found = units_below(*module);
  std::unordered_set<const Unit*> all;
  for (const auto& [name, unit] : found) all.insert(unit.get());
  for (const auto& [name, unit] : found) require_free(name, *unit, all);
  std::vector<std::shared_ptr<Unit>> units;
  for (const auto& [name, unit] : found) {
    unit->set_name(name);
    units.push_back(unit);
  }
  require_homogeneous(units);
  require_budget_of_root(units);
  root->take(std::move(units));
  return root;
}

void Root::take(std::vector<std::shared_ptr<Unit>> units) {
  for (const auto& unit : units) {
    auto& entry = entry_of(*unit);
    entry.id = static_cast<int>(units_.size());
    units_.push_back(unit);
    entry.root = shared_from_this();
    entry.backwards_due = 0;  // of a root before
    unit->share_pool(pool_);
    unit->buffers().place();
    unit->allow_early_reduction(units.size() == 1);
  }
}

std::vector<std::shared_ptr<Unit>> Root::units() const {
  std::vector<std::shared_ptr<Unit>> alive;
  for (const auto& weak : units_) {
    if (auto unit = weak.lock()) alive.push_back(std::move(unit));
  }
  return alive;
}

void Root::check_usable() const {
  const bool is_over = in_backward_ && (has_lost_backward() || !inside_backward());
  if (!failed_ && !is_over) return;
  throw Error(ErrorCode::invalid_argument,
              "an earlier forward or backward of this model ended with an exception; call "
              "tessera::abandon_step(model) on every rank to use it again");
}

// Parameters may have changed since the last pass (an optimizer, a checkpoint): what is still
// gathered is gathered anew, unless it was asked to stay and no operator changed it.
void Root::begin_pass() {
  pass_ = std::make_shared<Pass>();
  entered_.clear();
  if (inside_backward()) return;
  place_ = place_of_thread();
  // Casts that autocast has kept of an earlier pass are of older values, and their nodes are older
  // than those that tell when a backward is over.
  at::autocast::clear_cache();
  const auto all = units();
  pool_->follow_current();
  forget_dead_units(*state_of(all.front()->all_ranks()));
  for (const auto& unit : all) {
    unit->look_at_reductions(GradReducer::Look::pass);
    entry_of(*unit).modules_to_run = 0;
    unit->note_graph_of_backward(false);
    unit->follow_requires_grad();
    unit->adopt_replaced();
    if (torch::GradMode::is_enabled()) unit->note_trained();
  }
  free_outdated(all);
  if (torch::GradMode::is_enabled()) {
    ++steps_;
    if (is_training()) ++passes_;
  }
  order_.begin_pass(torch::GradMode::is_enabled());
  choose_kept(all);
}

// Chooses the units that stay gathered between their forward and their backward, as many as the
// budget allows, before the pass, so that the budget holds whatever order the pass takes, and by
// the order of the first one, so that all ranks choose the same, copies included. Without gradients
// no backward comes that would need it.
void Root::choose_kept(const std::vector<std::shared_ptr<Unit>>& all) const {
  for (const auto& unit : all) entry_of(*unit).is_within_budget = false;
  if (!torch::GradMode::is_enabled()) return;
  auto left = entry_of(*all.front()).keep_bytes;
  for (auto one = order_.known().rbegin(); left > 0 && one != order_.known().rend(); ++one) {
    const auto unit = one->lock();
    if (!unit || !unit->has_shards() || is_outermost(*unit)) continue;
    if (unit->options().reshard_after_forward || unit->whole_bytes() > left) continue;
    if (std::exchange(entry_of(*unit).is_within_budget, true)) continue;
    left -= unit->whole_bytes();
  }
}

void Root::tell(const std::string& where, const Unit* unit) const {
  auto text = where + " of step " + std::to_string(steps_);
  if (unit != nullptr)
    text += unit->name().empty() ? ", at the root" : ", at '" + unit->name() + "'";
  share_place(place_);
  set_whereabouts(std::move(text));
}

void Root::end_pass() {
  if (!inside_backward()) {
    for (const auto& unit : units()) end_pass_of(*unit);
    last_entered_ = std::exchange(entered_, {});
    order_.end_pass();
    tell(torch::GradMode::is_enabled() ? "after the forward" : "after a forward without gradients");
  }
  pass_.reset();
}

void Root::end_pass_of(Unit& unit) const {
  // Prefetched for nothing: the shard may change before anybody asks again.
  if (unit.param_state() == ParamState::gathering && !entry_of(unit).pinned) unit.free();
  // Only some of its modules were called.
  if (std::exchange(entry_of(unit).modules_to_run, 0) > 0 && frees_after_forward(unit)) unit.park();
  // No backward will come and free it.
  if (!torch::GradMode::is_enabled() && !entry_of(unit).pinned) unit.free();
}

// No rank can tell by itself what is out of date: what changed may be held by another one. One
// whose part is as it was gathers with the others.
void Root::free_outdated(const std::vector<std::shared_ptr<Unit>>& all) {
  std::vector<std::shared_ptr<Unit>> kept;
  std::vector<bool> changed;
  for (const auto& unit : all) {
    if (!entry_of(*unit).stays_gathered()) {
      unit->free();
    } else if (unit->has_shards() && unit->param_state() != ParamState::sharded) {
      kept.push_back(unit);
      changed.push_back(unit->changes().has_changed());
    }
  }
  if (kept.empty()) return;
  const Purpose purpose("comparing what stays gathered");
  changed = on_any_rank(kept, std::move(changed));
  for (std::size_t i = 0; i < kept.size(); ++i) {
    if (changed[i]) kept[i]->free();
  }
}

std::vector<bool> Root::on_any_rank(const std::vector<std::shared_ptr<Unit>>& units,
                                    std::vector<bool> here) {
  std::vector<bool> is_known(units.size());
  for (std::size_t first = 0; first < units.size(); ++first) {
    if (is_known[first]) continue;
    const Mesh ranks = units[first]->all_ranks();
    std::vector<std::size_t> together;
    for (std::size_t i = first; i < units.size(); ++i) {
      if (state_of(units[i]->all_ranks()).get() == state_of(ranks).get()) together.push_back(i);
    }
    std::vector<double> mine;
    for (const auto i : together) mine.push_back(here[i] ? 1 : 0);
    auto flags = torch::tensor(mine, at::kDouble).to(units[first]->device());
    ranks.all_reduce_sum(flags);
    flags = flags.cpu();
    for (std::size_t i = 0; i < together.size(); ++i) {
      here[together[i]] = flags[static_cast<std::int64_t>(i)].item<double>() > 0;
      is_known[together[i]] = true;
    }
  }
  return here;
}

bool Root::is_training() const {
  const auto top = units_.empty() ? nullptr : units_.front().lock();
  const auto module = top ? top->module() : nullptr;
  return module && module->is_training();
}

bool Root::is_outermost(const Unit& unit) const {
  return !units_.empty() && units_.front().lock().get() == &unit;
}

bool Root::frees_after_forward(const Unit& unit) const {
  if (entry_of(unit).pinned || inside_backward()) return false;
  const bool stays = is_outermost(unit) || entry_of(unit).is_within_budget;
  return unit.options().reshard_after_forward.value_or(!stays);
}

// What stays gathered after forward also does between micro-batches (fsdp-rows NS3).
bool Root::frees_after_backward(const Unit& unit) {
  if (entry_of(unit).pinned || !unit.options().reshard_after_backward) return false;
  return entry_of(unit).sync_gradients || unit.options().reshard_after_forward.value_or(true);
}

void Root::enter(Unit& unit, const std::vector<at::Tensor*>& inputs) {
  check_usable();
  require_no_capture(unit);
  if (stack_.empty()) {
    const Range range(unit, kRangeRootPreForward);
    begin_pass();
  }
  stack_.push_back({.unit = &unit, .range = std::make_unique<Range>(unit, kRangeForward)});
  tell(name_of_forward(), &unit);
  const Range range(unit, kRangePreForward);
  prepare_inputs(unit, inputs);
  const bool is_first = begins(unit);
  if (unit.is_sharded() && !inside_backward() && is_first) order_.enter(unit);
  make_whole(unit);
  if (is_first) {
    entered_.push_back(unit.weak_from_this());
    prefetch_from(unit);
  }
  unit.note(TraceStep::enter_forward);
  if (torch::GradMode::is_enabled()) {
    ++entry_of(unit).backwards_due;
    stack_.back().is_due = true;
    stack_.back().inputs = inputs_of(unit, inputs);
  }
}

// The first of several modules gathers for all.
bool Root::begins(Unit& unit) {
  auto& to_run = entry_of(unit).modules_to_run;
  if (unit.module_count() == 1) return true;
  if (to_run > 0) return false;
  to_run = unit.module_count();
  return true;
}

void Root::make_whole(Unit& unit) {
  const bool own = unit.computes_in_own_type();
  unit.buffers().use_own_dtype(own);
  if (own) {
    entry_of(unit).pinned = false;
    unit.show_own_type();
  } else {
    unit.gather();
  }
}

// To the device of the computation, the model's inputs, and to its dtype.
void Root::prepare_inputs(const Unit& unit, const std::vector<at::Tensor*>& inputs) const {
  if (stack_.size() == 1 && !unit.device().is_cpu()) {
    const Range range(unit, kRangeInputs);
    move_to(unit.device(), inputs);
  }
  if (casts_inputs(unit)) cast_floating(inputs, *unit.options().mixed_precision.param_dtype);
}

bool Root::casts_inputs(const Unit& unit) const {
  const auto& precision = unit.options().mixed_precision;
  const bool asked =
      precision.cast_forward_inputs || (unit.casts_root_inputs() && is_outermost(unit));
  return precision.param_dtype && asked && !unit.computes_in_own_type();
}

void Root::prefetch(const std::shared_ptr<Unit>& unit, const RangeName& name) {
  // What is computed in another dtype is gathered in it when it is needed.
  if (!unit || !unit->is_away() || unit->computes_in_own_type()) return;
  const Range range(*unit, name);
  unit->start_gather();
}

void Root::prefetch(const std::vector<std::weak_ptr<Unit>>& units, const RangeName& name) {
  for (const auto& weak : units) prefetch(weak.lock(), name);
}

// An activation checkpoint may be what enters it, in backward.
void Root::prefetch_from(const Unit& unit) {
  if (inside_backward()) {
    prefetch_before(unit);
  } else {
    prefetch_forward(unit);
  }
}

// The next unit is known while the pass goes like the one before.
void Root::prefetch_forward(const Unit& unit) {
  if (!entry_of(unit).forward_prefetch.empty())
    return prefetch(entry_of(unit).forward_prefetch, kRangePreForwardPrefetch);
  const auto at = entered_.size();
  if (!unit.options().forward_prefetch || at >= last_entered_.size()) return;
  for (std::size_t i = 0; i < at; ++i) {
    if (entered_[i].lock() != last_entered_[i].lock()) return;
  }
  prefetch(last_entered_[at].lock(), kRangePreForwardPrefetch);
}

// What an activation checkpoint computes again does not stand in the pass's order of backwards: the
// unit that the last forward entered before it comes next.
void Root::prefetch_before(const Unit& unit) {
  if (!entry_of(unit).backward_prefetch.empty())
    return prefetch(entry_of(unit).backward_prefetch, kRangePreBackwardPrefetch);
  if (entered_.size() != 1 || !unit.options().backward_prefetch) return;
  for (std::size_t i = 1; i < last_entered_.size(); ++i) {
    if (last_entered_[i].lock().get() != &unit) continue;
    return prefetch(last_entered_[i - 1].lock(), kRangePreBackwardPrefetch);
  }
}

// FSDP2 lets nobody change a unit's inputs in place; FSDP1 and DDP put nothing before them.
UnitInputs Root::inputs_of(Unit& unit, const std::vector<at::Tensor*>& inputs) {
  const bool lends = !unit.is_sharded() || unit.is_fsdp1();
  return {inputs, lends, [root = weak_from_this(), weak = unit.weak_from_this()] {
            const auto self = root.lock();
            const auto alive = weak.lock();
            if (self && alive) self->after_backward(*alive);
          }};
}

void Root::leave(Unit& unit, const std::vector<at::Tensor*>& results) {
  unit.note(TraceStep::leave_forward);
  const auto inputs = std::move(stack_.back().inputs);
  stack_.pop_back();
  const Range range(unit, kRangePostForward);
  end_call_of(unit);
  if (torch::GradMode::is_enabled()) attach_to_results(unit, inputs, results);
  cast_results(unit, results);
  if (stack_.empty()) end_pass();
}

// One that failed may not have come to where it counts.
void Root::end_call_of(Unit& unit) {
  unit.hide_own_type();
  auto& to_run = entry_of(unit).modules_to_run;
  const bool is_last = to_run == 0 || --to_run == 0;
  if (is_last && frees_after_forward(unit)) free_after_forward(unit);
}

// With a backward to come a larger part may stay.
void Root::free_after_forward(Unit& unit) {
  if (torch::GradMode::is_enabled()) {
    unit.park();
  } else {
    unit.free();
  }
}

// FSDP1 casts what the model returns, and not what its layers hand on.
void Root::cast_results(const Unit& unit, const std::vector<at::Tensor*>& results) const {
  const auto& dtype = unit.options().mixed_precision.output_dtype;
  if (dtype && (!unit.is_fsdp1() || is_outermost(unit))) cast_floating(results, *dtype);
}

void Root::attach_to_results(Unit& unit, const UnitInputs& inputs,
                             const std::vector<at::Tensor*>& results) {
  std::vector<at::Tensor> watched = inputs.changed();
  for (auto* result : results) {
    if (!wants_gradient(*result) || is_elsewhere(unit, *result)) continue;
    if (result->is_view()) warn_of_view(unit);
    if (lives_on(*result) || inputs.has_unchanged(*result)) *result = result->view_as(*result);
    if (std::ranges::none_of(watched, [&](const auto& one) { return one.is_same(*result); }))
      watched.push_back(*result);
  }
  await_backward(unit, watched);
}

// It begins where the gradient of one of these is there.
void Root::await_backward(Unit& unit, const std::vector<at::Tensor>& watched) {
  for (const auto& tensor : watched) watch_result(unit, tensor);
  if (!watched.empty()) {
    pass_->order.push_back(unit.weak_from_this());
  } else {
    --entry_of(unit).backwards_due;
  }
}

void Root::watch_result(Unit& unit, const at::Tensor& result) {
  result.register_hook([root = weak_from_this(), weak = unit.weak_from_this(), pass = pass_,
                        index = pass_->order.size(),
                        version = unit.changes().version()](const at::Tensor&) {
    const auto self = root.lock();
    const auto alive = weak.lock();
    if (self && alive) self->before_backward(*alive, *pass, index, version);
  });
}

void Root::close_to(std::size_t depth) {
  while (stack_.size() > depth) {
    const auto call = std::move(stack_.back());
    stack_.pop_back();
    auto& unit = *call.unit;
    unit.note(TraceStep::leave_forward);
    if (call.is_due) await_backward(unit, call.inputs.changed());
    end_call_of(unit);
  }
}

void Root::fail(std::size_t depth) noexcept {
  try {
    if (depth > 0) return close_to(depth);
    // What an activation checkpoint computes again may catch it; if not, the backward ends with it.
    if (in_backward_ && inside_backward()) {
      close_to(0);
      return end_pass();
    }
  } catch (...) {  // NOLINT(bugprone-empty-catch): then the whole step has failed
  }
  stack_.clear();
  pass_.reset();
  entered_.clear();
  failed_ = true;
}

void Root::abandon_step() {
  stack_.clear();
  pass_.reset();
  entered_.clear();
  last_entered_.clear();
  order_.forget();
  reducing_.clear();
  for (const auto& unit : units()) {
    auto& entry = entry_of(*unit);
    unit->hide_own_type();
    entry.modules_to_run = 0;
    unit->free();
    unit->forget_gradients();
    entry.pinned = false;
    entry.is_kept = false;
    entry.is_within_budget = false;
    entry.begins_step = true;
    entry.backwards_due = 0;
  }
  leaves_gradients_ = false;
  in_backward_ = false;
  failed_ = false;
  passes_ = backwards_ = reducing_backwards_ = 0;
  ++resets_;
}

std::uint32_t Root::pass_number(const Unit& unit) const {
  // Primes: a forward without backward here does not make up for another step there.
  constexpr std::uint32_t kBackward = 17, kReset = 4099;
  const auto resets = kReset * resets_;
  if (entry_of(unit).uneven_micro_batches) return reducing_backwards_ + resets;
  return passes_ + kBackward * backwards_ + resets;
}

}  // namespace tessera::detail
