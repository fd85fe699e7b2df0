// Takes a case apart, one thing at a time.
#include <utility>

#include "generated/case.h"

namespace tessera::generated {
namespace {

class Smaller {
 public:
  explicit Smaller(const Case& drawn) : drawn_(drawn) {}

  std::vector<Case> all() {
    drop_parts();
    for (std::size_t p = 0; p < drawn_.phases.size(); ++p) simplify_phase(p);
    for (std::size_t b = 0; b < drawn_.blocks.size(); ++b) simplify_block(b);
    offer([](Case& c) { c.precision = Precision::fp32; });
    offer([](Case& c) { c.gloo = false; });
    offer([](Case& c) { c.autocast = false; });
    offer([](Case& c) { c.checkpoint_all = false; });
    offer([](Case& c) { c.optimizer = OptimizerKind::sgd; });
    offer([](Case& c) { c.width = 4; });
    return std::move(found_);
  }

 private:
  template <typename Change>
  void offer(Change&& change) {
    auto next = drawn_;
    change(next);
    settle(next);
    if (describe(next) != describe(drawn_)) found_.push_back(std::move(next));
  }

  void drop_parts() {
    if (drawn_.phases.size() > 1) {
      offer([](Case& c) { c.phases.pop_back(); });
      offer([](Case& c) { c.phases.erase(c.phases.begin()); });
    }
    for (std::size_t b = 0; b < drawn_.blocks.size() && drawn_.blocks.size() > 1; ++b)
      drop_block(b);
    for (std::size_t p = 0; p < drawn_.phases.size(); ++p) {
      for (std::size_t s = 0; s < drawn_.phases[p].steps.size(); ++s) drop_step(p, s);
    }
  }

  void drop_block(std::size_t index) {
    const auto gone = static_cast<int>(index);
    if (drawn_.odd != Odd::nothing && drawn_.odd_block == gone) return;
    const auto moved = [gone](int& place) {
      if (place == gone) place = 0;
      if (place > gone) --place;
    };
    offer([&](Case& c) {
      c.blocks.erase(c.blocks.begin() + gone);
      for (auto& block : c.blocks) {
        if (block.source == gone) block = {.kind = BlockKind::linear};
        if (block.source > gone) --block.source;
      }
      for (auto& phase : c.phases) {
        phase.layout.units.erase(phase.layout.units.begin() + gone);
        for (auto& step : phase.steps) moved(step.block);
      }
      moved(c.odd_block);
    });
  }

  void drop_step(std::size_t phase, std::size_t step) {
    const bool has_odd = drawn_.odd != Odd::nothing && phase == 0;
    if (has_odd && drawn_.odd_step == static_cast<int>(step)) return;
    offer([&](Case& c) {
      auto& steps = c.phases[phase].steps;
      steps.erase(steps.begin() + static_cast<std::ptrdiff_t>(step));
      if (has_odd && c.odd_step > static_cast<int>(step)) --c.odd_step;
    });
  }

  void simplify_phase(std::size_t index) {
    const auto layout = [&](auto change) {
      offer([&](Case& c) { change(c.phases[index].layout); });
    };
    if (drawn_.phases[index].layout.world > 2 && drawn_.odd_rank < 2)
      layout([](Layout& l) { l.world = 2; });
    layout([](Layout& l) { l.hybrid = Hybrid::no; });
    layout([](Layout& l) { l.whole_units = false; });
    layout([](Layout& l) { l.inner = 0; });
    layout([](Layout& l) { l.keep_after_forward = false; });
    layout([](Layout& l) { l.keep_after_backward = false; });
    layout([](Layout& l) { l.keep_part = false; });
    layout([](Layout& l) { l.last_dimension = false; });
    layout([](Layout& l) { l.end_to_end = false; });
    layout([](Layout& l) { l.offload = false; });
    layout([](Layout& l) { l.keep_bytes = 0; });
    layout([](Layout& l) { l.divide_factor = 0; });
    layout([](Layout& l) { l.bucket_bytes = 0; });
    layout([](Layout& l) { l.backward_prefetch = 0; });
    layout([](Layout& l) { l.forward_prefetch = false; });
    for (std::size_t b = 0; b < drawn_.blocks.size(); ++b)
      layout([b](Layout& l) { l.units[b] = false; });
    for (std::size_t s = 0; s < drawn_.phases[index].steps.size(); ++s) {
      const auto step = [&](auto change) {
        offer([&](Case& c) { change(c.phases[index].steps[s]); });
      };
      step([](Step& one) { one.micros = 1; });
      step([](Step& one) { one.clip = 0; });
      step([](Step& one) { one.zero = Zero::model; });
      step([](Step& one) { one.accumulate = Accumulate::synced; });
      step([](Step& one) { one.form = Form::whole; });
      step([](Step& one) { one.extra = Extra::nothing; });
      step([](Step& one) { one.by_micro = false; });
      step([](Step& one) { one.caught = false; });
    }
  }

  void simplify_block(std::size_t index) {
    const auto block = [&](auto change) { offer([&](Case& c) { change(c.blocks[index]); }); };
    block([](Block& b) { b.twice = false; });
    block([](Block& b) { b.checkpoint = false; });
    block([](Block& b) { b.hook = false; });
    block([](Block& b) { b.frozen = Frozen::no; });
    block([](Block& b) { b.kind = BlockKind::linear; });
  }

  const Case& drawn_;
  std::vector<Case> found_;
};

}  // namespace

std::vector<Case> smaller(const Case& drawn) {
  return Smaller(drawn).all();
}

}  // namespace tessera::generated
