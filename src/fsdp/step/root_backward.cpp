// Root: what it does in backward.
#include <torch/csrc/autograd/engine.h>
#include <torch/torch.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "comm/whereabouts.h"
#include "fsdp/step/root.h"
#include "tessera/error.h"

namespace tessera::detail {
namespace {

// Reductions under way at once: one being filled while one travels. More only costs memory.
constexpr std::size_t kReductionsUnderWay = 2;

// Since the forward that saw `version` of them.
void require_unchanged(const Unit& unit, std::uint32_t version) {
  if (unit.changes().version() == version && !unit.is_replaced()) return;
  throw Error(
      ErrorCode::invalid_argument,
      "parameters of unit '" + unit.name() +
          "' were changed between a forward and its backward (an optimizer step in between?)");
}

bool reduces(const std::shared_ptr<Unit>& unit) {
  return entry_of(*unit).sync_gradients;
}

}  // namespace

void Root::begin_backward() {
  if (failed_ || has_lost_backward()) check_usable();
  if (in_backward_) return;
  const auto all = units();
  for (const auto& unit : all) {  // before anything is changed
    unit->require_accumulated();
    unit->require_kept_untouched();
  }
  for (const auto& unit : all) {
    unit->follow_requires_grad();
    unit->hide_gradients();
  }
  // The engine drops the callback, and with it what lives as long, when the backward is over.
  const auto alive = std::make_shared<const char>();
  torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this(), alive] {
    if (const auto self = weak.lock()) self->finish_backward();
  });
  backward_ = alive;
  in_backward_ = true;
  ++backwards_;
  if (std::ranges::any_of(all, reduces)) ++reducing_backwards_;
}

void Root::before_backward(Unit& unit, const Pass& pass, std::size_t index, std::uint32_t version) {
  const std::lock_guard turn(backward_turn_);
  auto& entry = entry_of(unit);
  const Range range(unit, kRangePreBackward);
  tell("the backward", &unit);
  begin_backward();
  require_unchanged(unit, version);
  // Autograd has gradients on where it records a backward.
  if (torch::GradMode::is_enabled()) unit.note_graph_of_backward(true);
  if (entry.unshard_in_backward) unit.gather();
  if (!frees_after_backward(unit)) unit.changes().remember();
  unit.enter_backward(
      {.pass = pass_number(unit), .sync = entry.sync_gradients, .replicas = entry.sync_replicas});
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
  const std::lock_guard turn(backward_turn_);
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
  if (--entry.backwards_due <= 0) reduce_or_keep(unit);
}

void Root::reduce_or_keep(Unit& unit) {
  if (entry_of(unit).sync_gradients) {
    reduce(unit);
  } else {
    unit.keep_gradients();
  }
}

void Root::reduce(Unit& unit) {
  while (reducing_.size() >= reduction_limit()) finish_oldest_reduction();
  for (const auto& weak : reducing_) {
    if (const auto before = weak.lock()) before->advance_reduce();
  }
  unit.start_reduce();
  reducing_.push_back(unit.weak_from_this());
}

std::size_t Root::reduction_limit() const {
  int limit = 0;
  for (const auto& unit : units())
    limit = std::max(limit, entry_of(*unit).reduction_limit.value_or(0));
  return limit > 0 ? static_cast<std::size_t>(limit) : kReductionsUnderWay;
}

void Root::finish_oldest_reduction() {
  const auto unit = reducing_.front().lock();
  reducing_.pop_front();
  if (!unit) return;
  // A second backward of a unit within one pass finishes the first reduction itself.
  if (unit->grad_state() == GradState::reducing) unit->finish_reduce();
}

// The units are those that this backward did not use. All ranks get the same ones: a forward does
// not talk if parameters are whole, and each rank may have used others.
std::vector<std::shared_ptr<Unit>> Root::units_with_left_gradients() {
  const auto all = units();
  const auto is_left = [](const auto& unit) {
    const auto& entry = entry_of(*unit);
    return reduces(unit) && unit->grad_state() == GradState::idle &&
           unit->has_left_gradients(entry.sync_replicas);
  };
  std::vector<bool> is_one;
  for (const auto& unit : all) is_one.push_back(is_left(unit));
  if (std::ranges::any_of(all, [](const auto& unit) { return !unit->is_sharded(); })) {
    while (!reducing_.empty()) finish_oldest_reduction();
    const Purpose purpose("comparing which units have gradients of earlier backwards");
    is_one = on_any_rank(all, std::move(is_one));
  }
  std::vector<std::shared_ptr<Unit>> left;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (is_one[i]) left.push_back(all[i]);
  }
  return left;
}

// What backwards without synchronisation left belongs to the step that this one ends, also where
// this one did not use the unit.
void Root::reduce_left() {
  const auto all = units();
  const auto reduces_all = [](const auto& unit) {
    return reduces(unit) && entry_of(*unit).sync_replicas;
  };
  // This rank may have run none of what another one has left.
  const bool may_be_left = leaves_gradients_ || std::ranges::any_of(all, [](const auto& unit) {
                             return entry_of(*unit).uneven_micro_batches;
                           });
  if (may_be_left && all.size() > 1 && std::ranges::any_of(all, reduces)) {
    for (const auto& unit : units_with_left_gradients()) {
      unit->enter_backward({.pass = pass_number(*unit), .replicas = entry_of(*unit).sync_replicas});
      reduce(*unit);
    }
  }
  leaves_gradients_ = !std::ranges::all_of(all, reduces_all);
}

void Root::finish_backward() {
  tell("the end of the backward");
  for (const auto& unit : units()) {
    auto& entry = entry_of(*unit);
    if (unit->grad_state() == GradState::collecting) {
      unit->note(TraceStep::leave_backward);
      reduce_or_keep(*unit);
    }
    entry.backwards_due = 0;
    entry.is_kept = !frees_after_backward(*unit);
    // Prefetched for nothing: the shard may change before anybody asks again.
    const bool is_for_nothing = unit->param_state() == ParamState::gathering && !entry.pinned;
    if (!entry.is_kept || is_for_nothing) unit->free();
  }
  reduce_left();
  in_backward_ = false;
  if (is_last_backward) {
    while (!reducing_.empty()) finish_oldest_reduction();
    for (const auto& unit : units()) unit->show_gradients();
  }
  tell("after the backward");
}

}  // namespace tessera::detail
