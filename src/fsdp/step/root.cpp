#include "fsdp/step/root.h"

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

namespace tessera::detail {
namespace {

// Reductions under way at once: one being filled while one travels. More only costs memory.
constexpr std::size_t kReductionsUnderWay = 2;

// Sits between a unit's inputs and what came before. Autograd runs it when the gradients of all
// inputs are there: after everything of the unit's own backward, whose nodes are younger.
class AfterBackward : public torch::autograd::Node {
 public:
  AfterBackward(torch::autograd::edge_list&& edges, std::function<void()> run)
      : Node(std::move(edges)), run_(std::move(run)) {}
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    run_();
    return std::move(gradients);
  }

 private:
  std::function<void()> run_;
};

// Only floating-point tensors are ever cast (spec MP10).
void cast_floating(const std::vector<at::Tensor*>& tensors, at::ScalarType dtype) {
  for (auto* tensor : tensors) {
    if (tensor->defined() && tensor->is_floating_point()) *tensor = tensor->to(dtype);
  }
}

// The optimizer sees flat parameters or original ones, not both; a model is evaluated in one way
// (spec X28, L36). Of FSDP1's units.
void require_homogeneous(const std::vector<std::shared_ptr<Unit>>& units) {
  std::set<bool> original, full_precision;
  for (const auto& unit : units) {
    if (!unit->is_sharded() || unit->geometry() == Geometry::rows) continue;
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

void prefetch(const std::shared_ptr<Unit>& unit, const RangeName& name) {
  // What is computed in another dtype is gathered in it when it is needed.
  if (!unit || !unit->is_away() || unit->computes_in_own_type()) return;
  const Range range(*unit, name);
  unit->start_gather();
}

void prefetch(const std::vector<std::weak_ptr<Unit>>& units, const RangeName& name) {
  for (const auto& weak : units) prefetch(weak.lock(), name);
}

// As FSDP2 does, once a unit.
void warn_of_view(Unit& unit) {
  if (!unit.is_sharded() || unit.geometry() != Geometry::rows) return;
  if (std::exchange(entry_of(unit).has_warned_of_views, true)) return;
  log(LogLevel::warning,
      "FSDP2-wrapped module ('" + unit.name() +
          "') returned a view tensor. An in-place op on this view (e.g., `x += y`) will silently "
          "drop the pre-backward hook and skip the all-gather, which can cause backward to fail or "
          "produce wrong gradients. Use out-of-place ops (`out = out + y`, not `out += y`) or "
          "`.clone()` the output before any in-place op.");
}

bool inside_backward() {
  return torch::autograd::get_current_graph_task_id() >= 0;
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
  std::vector<std::pair<std::string, std::shared_ptr<Unit>>> found;
  std::unordered_set<const Unit*> seen;
  const auto join = [&](const std::string& name, const torch::nn::Module& below) {
    auto unit = find_unit(&below);
    if (unit && seen.insert(unit.get()).second) found.emplace_back(name, std::move(unit));
  };
  join("", *module);
  for (const auto& child : module->named_modules(std::string(), false))
    join(child.key(), *child.value());
  for (const auto& [name, unit] : found) require_free(name, *unit, seen);
  std::vector<std::shared_ptr<Unit>> units;
  for (const auto& [name, unit] : found) {
    unit->set_name(name);
    units.push_back(unit);
  }
  require_homogeneous(units);
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
  if (!failed_ && (!in_backward_ || inside_backward())) return;
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
  const bool is_old = has_kept_changed();
  for (const auto& unit : units()) {
    auto& entry = entry_of(*unit);
    entry.modules_to_run = 0;
    unit->follow_requires_grad();
    unit->adopt_replaced();
    const bool is_kept = entry.is_kept || entry.pinned;
    if (!is_kept || unit->changes().is_stale() || (is_old && unit->changes().is_remembered()))
      unit->free();
  }
  if (torch::GradMode::is_enabled()) {
    ++steps_;
    if (is_training()) ++passes_;
  }
  order_.begin_pass(torch::GradMode::is_enabled());
}

void Root::tell(const std::string& where, const Unit* unit) const {
  auto text = where + " of step " + std::to_string(steps_);
  if (unit != nullptr)
    text += unit->name().empty() ? ", at the root" : ", at '" + unit->name() + "'";
  set_whereabouts(std::move(text));
}

void Root::end_pass() {
  if (!inside_backward()) {
    for (const auto& unit : units()) {
      // Prefetched for nothing: the shard may change before anybody asks again.
      if (unit->param_state() == ParamState::gathering) unit->free();
      // Only some of its modules were called.
      if (std::exchange(entry_of(*unit).modules_to_run, 0) > 0 && frees_after_forward(*unit))
        unit->park();
      // No backward will come and free it.
      if (!torch::GradMode::is_enabled() && !entry_of(*unit).pinned) unit->free();
    }
    last_entered_ = std::exchange(entered_, {});
    order_.end_pass();
    tell(torch::GradMode::is_enabled() ? "after the forward" : "after a forward without gradients");
  }
  pass_.reset();
}

// Of what stays gathered after a backward. A rank whose part is as it was gathers with the others.
bool Root::has_kept_changed() const {
  std::vector<std::shared_ptr<Unit>> kept;
  for (const auto& unit : units()) {
    if ((entry_of(*unit).is_kept || entry_of(*unit).pinned) && unit->changes().is_remembered())
      kept.push_back(unit);
  }
  if (kept.empty()) return false;
  const bool here =
      std::ranges::any_of(kept, [](const auto& unit) { return unit->changes().has_changed(); });
  const Purpose purpose("comparing what stays gathered");
  return kept.front()->all_ranks().all_reduce_max(here ? 1.0 : 0.0) > 0;
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
  return unit.options().reshard_after_forward.value_or(!is_outermost(unit));
}

// What stays gathered after forward also does between micro-batches (spec NS3).
bool Root::frees_after_backward(const Unit& unit) {
  if (entry_of(unit).pinned || !unit.options().reshard_after_backward) return false;
  return entry_of(unit).sync_gradients || unit.options().reshard_after_forward.value_or(true);
}

void Root::enter(Unit& unit, const std::vector<at::Tensor*>& inputs) {
  auto& entry = entry_of(unit);
  check_usable();
  if (stack_.empty()) {
    const Range range(unit, kRangeRootPreForward);
    begin_pass();
  }
  stack_.push_back({&unit, std::make_unique<Range>(unit, kRangeForward)});
  tell(inside_backward()               ? "the backward"
       : torch::GradMode::is_enabled() ? "the forward"
                                       : "a forward without gradients",
       &unit);
  const Range range(unit, kRangePreForward);
  prepare_inputs(unit, inputs);
  // Of several modules the first one gathers for all.
  const bool is_one = unit.module_count() == 1;
  const bool is_first = is_one || entry.modules_to_run == 0;
  if (is_first && !is_one) entry.modules_to_run = unit.module_count();
  if (unit.is_sharded() && !inside_backward() && is_first) order_.enter(unit);
  make_whole(unit);
  if (is_first) {
    entered_.push_back(unit.weak_from_this());
    if (inside_backward()) {
      prefetch_before(unit);
    } else {
      prefetch_forward(unit);
    }
  }
  unit.note(TraceStep::enter_forward);
  if (torch::GradMode::is_enabled()) {
    ++entry.backwards_due;
    attach_to_inputs(unit, inputs);
  }
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
    for (auto* input : inputs) {
      if (input->defined() && input->device() != unit.device()) *input = input->to(unit.device());
    }
  }
  const auto& precision = unit.options().mixed_precision;
  const bool casts =
      precision.cast_forward_inputs || (unit.casts_root_inputs() && is_outermost(unit));
  if (precision.param_dtype && casts && !unit.computes_in_own_type())
    cast_floating(inputs, *precision.param_dtype);
}

// While the pass goes like the one before, the next unit is known.
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

void Root::attach_to_inputs(Unit& unit, const std::vector<at::Tensor*>& inputs) {
  std::vector<at::Tensor*> wanted;
  torch::autograd::edge_list edges;
  for (auto* input : inputs) {
    if (!input->defined() || !input->requires_grad()) continue;
    wanted.push_back(input);
    edges.push_back(torch::autograd::impl::gradient_edge(*input));
  }
  if (wanted.empty()) return;
  auto node = compat::make_node<AfterBackward>(
      std::move(edges), [root = weak_from_this(), weak = unit.weak_from_this()] {
        const auto self = root.lock();
        const auto alive = weak.lock();
        if (self && alive) self->after_backward(*alive);
      });
  for (auto* input : wanted) {
    at::Tensor seen;
    {
      torch::NoGradGuard no_grad;
      seen = input->view_as(*input);
    }
    torch::autograd::create_gradient_edge(seen, node);
    *input = std::move(seen);
  }
}

void Root::leave(Unit& unit, const std::vector<at::Tensor*>& results) {
  unit.note(TraceStep::leave_forward);
  stack_.pop_back();
  const Range range(unit, kRangePostForward);
  unit.hide_own_type();
  const bool is_last = unit.module_count() == 1 || --entry_of(unit).modules_to_run == 0;
  if (is_last && frees_after_forward(unit)) {
    if (torch::GradMode::is_enabled()) {
      unit.park();
    } else {
      unit.free();
    }
  }
  if (torch::GradMode::is_enabled()) attach_to_results(unit, results);
  // FSDP1 casts what the model returns, and not what its layers hand on.
  const auto& dtype = unit.options().mixed_precision.output_dtype;
  if (dtype && (unit.geometry() == Geometry::rows || is_outermost(unit)))
    cast_floating(results, *dtype);
  if (stack_.empty()) end_pass();
}

void Root::attach_to_results(Unit& unit, const std::vector<at::Tensor*>& results) {
  bool attached = false;
  const auto index = pass_->order.size();
  for (auto* result : results) {
    if (!result->defined() || !result->requires_grad()) continue;
    attached = true;
    if (result->is_view()) warn_of_view(unit);
    result->register_hook([root = weak_from_this(), weak = unit.weak_from_this(), pass = pass_,
                           index, version = unit.changes().version()](const at::Tensor&) {
      const auto self = root.lock();
      const auto alive = weak.lock();
      if (self && alive) self->before_backward(*alive, *pass, index, version);
    });
  }
  if (attached) {
    pass_->order.push_back(unit.weak_from_this());
  } else {
    --entry_of(unit).backwards_due;
  }
}

void Root::fail() noexcept {
  stack_.clear();
  pass_.reset();
  entered_.clear();
  failed_ = true;
}

// Backward ----------------------------------------------------------------------------------------

void Root::begin_backward() {
  if (in_backward_) return;
  if (failed_) check_usable();
  for (const auto& unit : units()) {
    unit->require_accumulated();
    unit->follow_requires_grad();
    unit->hide_gradients();
  }
  torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->finish_backward();
  });
  in_backward_ = true;
  ++backwards_;
}

void Root::before_backward(Unit& unit, const Pass& pass, std::size_t index, std::uint32_t version) {
  auto& entry = entry_of(unit);
  const Range range(unit, kRangePreBackward);
  tell("the backward", &unit);
  begin_backward();
  if (unit.changes().version() != version || unit.is_replaced()) {
    throw Error(
        ErrorCode::invalid_argument,
        "parameters of unit '" + unit.name() +
            "' were changed between a forward and its backward (an optimizer step in between?)");
  }
  if (entry.unshard_in_backward) unit.gather();
  if (!frees_after_backward(unit)) unit.changes().remember();
  unit.enter_backward(
      {.pass = pass_number(), .sync = entry.sync_gradients, .replicas = entry.sync_replicas});
  entry.next_in_backward = index > 0 ? pass.order[index - 1] : std::weak_ptr<Unit>();
  if (unit.options().backward_prefetch == BackwardPrefetch::pre)
    prefetch_backward(unit, kRangePreBackwardPrefetch);
  unit.note(TraceStep::enter_backward);
}

void Root::prefetch_backward(const Unit& unit, const RangeName& name) {
  if (!entry_of(unit).backward_prefetch.empty())
    return prefetch(entry_of(unit).backward_prefetch, name);
  const auto next = entry_of(unit).next_in_backward.lock();
  if (next && entry_of(*next).unshard_in_backward) prefetch(next, name);
}

void Root::after_backward(Unit& unit) {
  auto& entry = entry_of(unit);
  if (unit.grad_state() != GradState::collecting) return;
  const Range range(unit, kRangePostBackward);
  unit.note(TraceStep::leave_backward);
  // Others of its modules need what is gathered.
  const bool is_last = unit.module_count() == 1 || entry.backwards_due <= 1;
  if (is_last && frees_after_backward(unit)) unit.free();
  if (unit.options().backward_prefetch == BackwardPrefetch::post)
    prefetch_backward(unit, kRangePostBackwardPrefetch);
  // Gradients of parameters used by several forwards are complete after the last of them only.
  if (--entry.backwards_due > 0) return;
  if (entry.sync_gradients) {
    reduce(unit);
  } else {
    unit.keep_gradients();
  }
}

void Root::reduce(Unit& unit) {
  while (reducing_.size() >= reduction_limit()) finish_oldest_reduction();
  for (const auto& before : reducing_) before->advance_reduce();
  unit.start_reduce();
  reducing_.push_back(unit.shared_from_this());
}

std::size_t Root::reduction_limit() const {
  int limit = 0;
  for (const auto& unit : units())
    limit = std::max(limit, entry_of(*unit).reduction_limit.value_or(0));
  return limit > 0 ? static_cast<std::size_t>(limit) : kReductionsUnderWay;
}

void Root::finish_oldest_reduction() {
  const auto unit = std::move(reducing_.front());
  reducing_.pop_front();
  // A second backward of a unit within one pass finishes the first reduction itself.
  if (unit->grad_state() == GradState::reducing) unit->finish_reduce();
}

void Root::finish_backward() {
  tell("the end of the backward");
  for (const auto& unit : units()) {
    auto& entry = entry_of(*unit);
    if (unit->grad_state() == GradState::collecting) {
      unit->note(TraceStep::leave_backward);
      if (entry.sync_gradients) {
        reduce(*unit);
      } else {
        unit->keep_gradients();
      }
    }
    entry.backwards_due = 0;
    entry.is_kept = !frees_after_backward(*unit);
    if (!entry.is_kept) unit->free();
  }
  in_backward_ = false;
  if (is_last_backward) {
    while (!reducing_.empty()) finish_oldest_reduction();
    for (const auto& unit : units()) unit->show_gradients();
  }
  tell("after the backward");
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
    entry.backwards_due = 0;
  }
  in_backward_ = false;
  failed_ = false;
  passes_ = backwards_ = 0;
  ++resets_;
}

std::uint32_t Root::pass_number() const noexcept {
  // Primes: a forward without backward here does not make up for another step there.
  constexpr std::uint32_t kBackward = 17, kReset = 4099;
  return passes_ + kBackward * backwards_ + kReset * resets_;
}

}  // namespace tessera::detail
