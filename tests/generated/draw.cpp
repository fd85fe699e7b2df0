// Draws a case, and takes out of it what the headers forbid.
#include <algorithm>
#include <random>

#include "generated/case.h"

namespace tessera::generated {
namespace {

class Dice {
 public:
  explicit Dice(std::uint64_t seed) : random_(seed * 7919 + 17) {}
  // 0 to count - 1. Not a distribution of the library's, whose results may differ.
  int pick(int count) { return static_cast<int>(random_() % static_cast<unsigned>(count)); }
  bool chance(int percent) { return pick(100) < percent; }
  template <typename Enum>
  Enum pick_of(std::initializer_list<Enum> choices) {
    return *(choices.begin() + pick(static_cast<int>(choices.size())));
  }
  std::uint64_t number() { return random_(); }

 private:
  std::mt19937_64 random_;
};

Block draw_block(Dice& dice, const std::vector<Block>& before) {
  Block block;
  block.kind = static_cast<BlockKind>(dice.pick(static_cast<int>(BlockKind::empty) + 1));
  if (block.kind == BlockKind::tied) {
    for (int i = 0; i < static_cast<int>(before.size()); ++i) {
      if (before[i].kind == BlockKind::linear) block.source = i;
    }
    if (block.source < 0) block.kind = BlockKind::linear;
  }
  block.twice = dice.chance(15);
  block.checkpoint = dice.chance(20);
  if (dice.chance(15)) block.frozen = dice.chance(70) ? Frozen::all : Frozen::first;
  return block;
}

Layout draw_layout(Dice& dice, std::size_t blocks) {
  Layout layout;
  layout.world = 1 + dice.pick(4);
  layout.style = dice.pick_of({Style::rows, Style::rows, Style::rows, Style::flat,
                               Style::flat_original, Style::replicate, Style::ddp});
  if (dice.chance(25)) layout.hybrid = dice.chance(70) ? Hybrid::halves : Hybrid::copies;
  layout.whole_units = dice.chance(10);
  layout.keep_after_forward = dice.chance(30);
  layout.keep_after_backward = dice.chance(15);
  layout.forward_prefetch = dice.chance(70);
  layout.backward_prefetch = dice.pick(3);
  layout.keep_part = dice.chance(15);
  layout.last_dimension = dice.chance(20);
  layout.offload = dice.chance(10);
  if (dice.chance(10)) layout.divide_factor = 1 + dice.pick(5);
  if (dice.chance(60)) layout.bucket_bytes = 50 + 200 * dice.pick(5);
  const int share = dice.pick_of({0, 50, 80, 100});
  for (std::size_t i = 0; i < blocks; ++i) layout.units.push_back(dice.chance(share));
  if (dice.chance(50)) layout.inner = dice.pick_of({20, 50, 100});
  layout.inner_seed = dice.number();
  // Not another draw: seeds that are known keep all else.
  layout.end_to_end = layout.inner_seed % 2 == 0;
  const int keeps[] = {0, 0, 2000, 1 << 20};
  layout.keep_bytes = keeps[layout.inner_seed / 2 % 4];
  return layout;
}

Step draw_step(Dice& dice, int blocks) {
  Step step;
  step.action = dice.pick_of(
      {Action::train, Action::train, Action::train, Action::train, Action::train,
       Action::train_twice_forward, Action::train_unsharded, Action::forward_only, Action::no_step,
       Action::evaluate, Action::freeze, Action::thaw, Action::save, Action::save, Action::load,
       Action::change, Action::look, Action::fail_and_abandon});
  if (dice.chance(30)) step.micros = 2 + dice.pick(2);
  step.accumulate = dice.pick_of({Accumulate::synced, Accumulate::no_sync, Accumulate::flag});
  step.zero = dice.pick_of({Zero::model, Zero::optimizer, Zero::to_zero, Zero::none});
  if (dice.chance(40)) step.clip = dice.chance(50) ? 0.05 : 100;
  step.norm = dice.pick_of({2.0, 2.0, 1.0, 3.0, 1e300});
  step.block = dice.pick(blocks);
  step.fault = dice.chance(50) ? Fault::in_backward : Fault::before_call;
  step.form = dice.pick_of({Form::whole, Form::checkpoint, Form::sharded_checkpoint});
  return step;
}

void draw_odd(Dice& dice, Case& drawn) {
  auto& [layout, steps] = drawn.phases.front();
  drawn.phases.resize(1);
  layout.world = 2 + dice.pick(3);
  drawn.odd = static_cast<Odd>(1 + dice.pick(static_cast<int>(Odd::leaves)));
  drawn.odd_rank = dice.pick(layout.world);
  drawn.odd_block = dice.pick(static_cast<int>(drawn.blocks.size()));
  drawn.odd_step = dice.pick(static_cast<int>(steps.size()));
  auto& step = steps[drawn.odd_step];
  const bool may_evaluate = drawn.odd == Odd::skips_call || drawn.odd == Odd::swaps_calls;
  if (step.action != Action::train && !(may_evaluate && step.action == Action::evaluate))
    step.action = may_evaluate && dice.chance(40) ? Action::evaluate : Action::train;
  if (drawn.odd == Odd::accumulates_alone) {
    step.micros = 2;
    step.accumulate = Accumulate::synced;
  }
}

// Taking out ------------------------------------------------------------------------------------

void settle_layout(const Case& drawn, Layout& layout) {
  const bool is_flat = layout.style == Style::flat || layout.style == Style::flat_original;
  const bool is_whole = layout.style == Style::replicate || layout.style == Style::ddp;
  if (is_whole) layout.hybrid = Hybrid::no;
  if (is_whole) layout.keep_bytes = 0;
  if (layout.hybrid == Hybrid::halves && layout.world % 2 != 0) layout.hybrid = Hybrid::no;
  if (!is_flat) layout.whole_units = false;
  // A hybrid strategy is one of its own.
  if (layout.hybrid != Hybrid::no) layout.whole_units = false;
  if (layout.style != Style::rows) {
    layout.keep_after_backward = layout.keep_part = layout.last_dimension = false;
    layout.end_to_end = false;
    if (layout.style != Style::replicate) layout.divide_factor = 0;
  }
  if (layout.end_to_end) layout.last_dimension = false;
  for (int i = 0; i < static_cast<int>(drawn.blocks.size()); ++i) {
    if (has_complex(drawn.blocks[i])) layout.units[i] = true;  // a flat parameter has one type
  }
  if (layout.style == Style::rows && has(drawn, Feature::in_place_inputs)) layout.inner = 0;
  // There has to be a factor of the ranks that share, and nothing else is asked for.
  if (layout.keep_after_forward || sharing_ranks(layout) != 4) layout.keep_part = false;
  for (int i = 0; i < static_cast<int>(drawn.blocks.size()); ++i) {
    if (shares_weight(drawn, i)) layout.units[i] = false;
  }
}

bool has_two_forwards(const Case& drawn) {
  return std::ranges::any_of(drawn.phases, [](const Phase& phase) {
    return std::ranges::any_of(
        phase.steps, [](const Step& step) { return step.action == Action::train_twice_forward; });
  });
}

bool has_buckets(const Case& drawn) {
  return std::ranges::any_of(
      drawn.phases, [&](const Phase& phase) { return stays_whole(phase.layout, drawn.precision); });
}

// A flat parameter is frozen as a whole or not at all.
bool can_be_frozen(const Case& drawn, int block) {
  if (shares_weight(drawn, block)) return false;
  return std::ranges::all_of(drawn.phases, [&](const Phase& phase) {
    return phase.layout.style != Style::flat || phase.layout.units[block];
  });
}

void settle_block(const Case& drawn, int index, Block& block) {
  const auto any_style = [&](Style style) {
    return std::ranges::any_of(drawn.phases,
                               [&](const Phase& phase) { return phase.layout.style == style; });
  };
  if (!can_be_frozen(drawn, index) || block.kind == BlockKind::empty) block.frozen = Frozen::no;
  if (block.frozen == Frozen::first && any_style(Style::flat)) block.frozen = Frozen::all;
  // Buckets leave while backward goes on: a gradient must not come twice.
  const bool comes_twice = block.twice || has_two_forwards(drawn) || shares_weight(drawn, index);
  if (comes_twice && has_buckets(drawn)) block.checkpoint = false;
}

void settle_steps(const Case& drawn, std::vector<Step>& steps) {
  bool froze = false;
  for (auto& step : steps) {
    const bool changes = step.action == Action::freeze || step.action == Action::thaw;
    if (changes &&
        (!can_be_frozen(drawn, step.block) || drawn.blocks[step.block].frozen == Frozen::first)) {
      step.action = Action::evaluate;
    }
    froze = froze || step.action == Action::freeze || step.action == Action::thaw;
    // FSDP1 forgets the gradient of a frozen parameter, others keep it; an optimizer may not hold
    // one that was thawed later.
    if (froze) step.zero = Zero::model;
  }
  // What is kept is reduced by the step after it, or dropped there.
  for (std::size_t i = 0; i < steps.size(); ++i) {
    const bool is_followed = i + 1 < steps.size() && steps[i + 1].action == Action::train &&
                             steps[i + 1].zero != Zero::to_zero;
    if (steps[i].action == Action::leave_unsynced && !is_followed)
      steps[i].action = Action::evaluate;
  }
}

// What libtorch can do with complex numbers and with autocast.
void settle_types(Case& drawn) {
  if (std::ranges::any_of(drawn.blocks, has_complex)) {
    drawn.precision = Precision::fp32;
    drawn.optimizer = OptimizerKind::sgd;
  }
  if (drawn.autocast) drawn.precision = Precision::fp32;
}

}  // namespace

int sharing_ranks(const Layout& layout) {
  if (layout.style == Style::replicate || layout.style == Style::ddp) return 1;
  if (layout.whole_units || layout.hybrid == Hybrid::copies) return 1;
  return layout.hybrid == Hybrid::halves ? layout.world / 2 : layout.world;
}

bool stays_whole(const Layout& layout, Precision precision) {
  if (layout.style == Style::rows) return false;
  if (layout.style == Style::replicate || layout.style == Style::ddp) return true;
  // FSDP1 is NO_SHARD where one rank has all, unless that is in another type or place.
  return sharing_ranks(layout) == 1 && !is_low(precision) && !layout.offload;
}

bool shares_weight(const Case& drawn, int block) {
  if (drawn.blocks[block].kind == BlockKind::tied) return true;
  return std::ranges::any_of(drawn.blocks, [&](const Block& other) {
    return other.kind == BlockKind::tied && other.source == block;
  });
}

bool has_complex(const Block& block) {
  return block.kind == BlockKind::complex_parameters || block.kind == BlockKind::conjugates;
}

void settle(Case& drawn) {
  settle_types(drawn);
  for (auto& phase : drawn.phases) {
    const bool is_whole =
        phase.layout.style == Style::replicate || phase.layout.style == Style::ddp;
    if (is_whole && is_low(drawn.precision)) drawn.precision = Precision::fp32;
  }
  for (auto& block : drawn.blocks) {
    const bool has_source =
        block.source >= 0 && drawn.blocks[block.source].kind == BlockKind::linear;
    if (block.kind == BlockKind::tied && !has_source) block = {.kind = BlockKind::linear};
  }
  for (auto& phase : drawn.phases) settle_layout(drawn, phase.layout);
  for (std::size_t i = 0; i < drawn.blocks.size(); ++i)
    settle_block(drawn, static_cast<int>(i), drawn.blocks[i]);
  const bool any_twice =
      has_two_forwards(drawn) || std::ranges::any_of(drawn.blocks, &Block::twice);
  if (any_twice && has_buckets(drawn)) drawn.checkpoint_all = false;
  for (auto& phase : drawn.phases) settle_steps(drawn, phase.steps);
  // The norm of gradients needs no other rank where every rank has all of them.
  if (drawn.odd == Odd::clips_alone && sharing_ranks(drawn.phases.front().layout) == 1)
    drawn.odd = Odd::skips_backward;
}

Case draw(std::uint64_t seed) {
  Dice dice(seed);
  Case drawn;
  drawn.seed = seed;
  drawn.width = dice.pick_of({4, 6, 8});
  drawn.precision =
      dice.pick_of({Precision::fp32, Precision::fp32, Precision::fp32, Precision::fp32,
                    Precision::fp32, Precision::fp64, Precision::bf16, Precision::bf16_reduce});
  drawn.optimizer = static_cast<OptimizerKind>(dice.pick(6));
  for (int i = 1 + dice.pick(4); i > 0; --i) drawn.blocks.push_back(draw_block(dice, drawn.blocks));
  const auto blocks = drawn.blocks.size();
  for (int p = dice.chance(40) ? 2 : 1; p > 0; --p) {
    auto& phase = drawn.phases.emplace_back(Phase{draw_layout(dice, blocks), {}});
    for (int s = 2 + dice.pick(5); s > 0; --s)
      phase.steps.push_back(draw_step(dice, static_cast<int>(blocks)));
  }
  if (seed % 3 == 0) draw_odd(dice, drawn);
  settle(drawn);
  return drawn;
}

}  // namespace tessera::generated
