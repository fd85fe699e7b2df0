// Draws cases in which features meet.
#include <algorithm>
#include <random>
#include <utility>

#include "generated/case.h"

namespace tessera::generated {
namespace {

constexpr int kPairs = kFeatures * (kFeatures - 1) / 2;
constexpr int kStyleKinds = 5;

std::pair<Feature, Feature> pair_at(int index) {
  int first = 0;
  for (int left = kFeatures - 1; index >= left; --left, ++first) index -= left;
  return {static_cast<Feature>(first), static_cast<Feature>(first + 1 + index)};
}

bool trains(const Step& step) {
  return step.action == Action::train || step.action == Action::train_twice_forward ||
         step.action == Action::train_unsharded || step.action == Action::no_step;
}

// Puts features into a case that was drawn without them.
class Adding {
 public:
  explicit Adding(Case& drawn) : drawn_(drawn), number_(static_cast<unsigned>(drawn.seed / 7)) {}

  void add(Feature feature) {
    switch (feature) {
      case Feature::autocast:
        drawn_.autocast = true;
        drawn_.precision = Precision::fp32;
        return;
      case Feature::checkpoint_around_all:
        return checkpoint_all();
      case Feature::nested_checkpoints:
        drawn_.blocks[0].checkpoint = true;
        return checkpoint_all();
      case Feature::checkpoint_of_complex:
        return add_block(BlockKind::complex_result);
      case Feature::blocks_by_micro:
        return leave_out_by_micro();
      case Feature::adversarial:
        return each_training([](Step& step) { step.extra = Extra::adversarial; });
      case Feature::gradient_penalty:
        return append({.extra = Extra::penalty});
      case Feature::complex_parameters:
        return add_block(BlockKind::complex_parameters);
      case Feature::conjugates:
        return add_block(BlockKind::conjugates);
      case Feature::strided:
        return add_block(BlockKind::strided);
      case Feature::set_data:
        return insert({{.action = Action::set_data}});
      case Feature::zero_by_optimizer:
        return insert({{.action = Action::leave_unsynced}, {.zero = Zero::optimizer}});
      case Feature::zero_by_module:
        return insert({{.action = Action::leave_unsynced}, {.zero = Zero::model}});
      case Feature::frozen_and_thawed:
        return freeze_and_thaw();
      case Feature::divide_factor:
        return divide();
      case Feature::hooks:
        for (auto& block : drawn_.blocks) block.hook = true;
        return;
      case Feature::caught_in_forward:
        add_block(BlockKind::thrower);
        return each_training([](Step& step) { step.caught = true; });
      case Feature::caught_in_backward:
        return insert({{.action = Action::fail_and_go_on, .block = any_block()}});
      case Feature::changed_recomputing:
        return insert({{.action = Action::fail_and_abandon,
                        .block = any_block(),
                        .fault = Fault::other_recomputing}});
      case Feature::failed_load:
        return insert({{.action = Action::failed_load}});
      case Feature::in_place_inputs:
        return add_block(BlockKind::in_place);
      case Feature::inside_full_params:
        return insert({{.action = Action::save_inside, .form = any_form()},
                       {},
                       {.action = Action::load_inside},
                       {}});
      case Feature::values_of_ranks:
        return insert(
            {{.action = Action::save, .form = Form::checkpoint}, {}, {.action = Action::load}, {}});
      case Feature::second_model:
        return;
      case Feature::forks:
        return insert({{.action = Action::fork}, {}});
      case Feature::other_meshes:
        return insert({{.action = Action::other_mesh}, {}, {.action = Action::other_mesh}});
    }
  }

 private:
  Form any_form() { return number_++ % 2 == 0 ? Form::whole : Form::checkpoint; }
  int any_block() { return static_cast<int>(number_++ % drawn_.blocks.size()); }

  template <typename Change>
  void each_training(Change&& change) {
    for (auto& phase : drawn_.phases) {
      for (auto& step : phase.steps) {
        if (trains(step)) change(step);
      }
    }
  }

  void append(const Step& step) {
    for (auto& phase : drawn_.phases) phase.steps.push_back(step);
  }

  // In the middle; what comes after it has to be right again.
  void insert(const std::vector<Step>& steps) {
    for (auto& phase : drawn_.phases) {
      const auto middle = static_cast<std::ptrdiff_t>((phase.steps.size() + 1) / 2);
      phase.steps.insert(phase.steps.begin() + middle, steps.begin(), steps.end());
    }
  }

  void add_block(BlockKind kind) {
    drawn_.blocks.push_back({.kind = kind, .checkpoint = number_ % 3 == 0});
    // A unit of its own: flat parameters have one element type.
    for (auto& phase : drawn_.phases) phase.layout.units.push_back(true);
  }

  // With buckets no gradient may come twice.
  void checkpoint_all() {
    drawn_.checkpoint_all = true;
    for (auto& block : drawn_.blocks) block.twice = false;
    each_training([](Step& step) {
      if (step.action == Action::train_twice_forward) step.action = Action::train;
    });
  }

  void leave_out_by_micro() {
    while (drawn_.blocks.size() < 3) add_block(BlockKind::mlp);
    each_training([](Step& step) {
      step.micros = std::max(step.micros, 2);
      step.accumulate = Accumulate::no_sync;
      step.by_micro = true;
    });
  }

  void freeze_and_thaw() {
    add_block(BlockKind::mlp);
    const int block = static_cast<int>(drawn_.blocks.size()) - 1;
    insert({{.action = Action::freeze, .block = block},
            {},
            {.action = Action::thaw, .block = block},
            {}});
  }

  void divide() {
    for (auto& phase : drawn_.phases) {
      phase.layout.style = number_ % 2 == 0 ? Style::rows : Style::replicate;
      phase.layout.divide_factor = 1 + number_ % 5;
    }
  }

  Case& drawn_;
  unsigned number_;  // varies what no die was thrown for
};

}  // namespace

Case draw_with_more(std::uint64_t seed) {
  auto drawn = draw(seed);
  if (drawn.odd != Odd::nothing) return drawn;
  std::mt19937_64 dice(seed);
  Adding adding(drawn);
  for (const auto feature :
       {Feature::inside_full_params, Feature::frozen_and_thawed, Feature::second_model,
        Feature::values_of_ranks, Feature::forks, Feature::other_meshes}) {
    if (dice() % 4 != 0) continue;
    drawn.features.push_back(feature);
    adding.add(feature);
  }
  settle(drawn);
  return drawn;
}

Case draw_pair(std::uint64_t seed) {
  auto drawn = draw(3 * seed + 1);  // every third one has a rank that differs
  drawn.seed = seed;
  const auto round = seed / kPairs;
  for (auto& phase : drawn.phases) {
    phase.layout.style = static_cast<Style>(round % kStyleKinds);
    phase.layout.world = std::max(phase.layout.world, 2);
    phase.steps.insert(phase.steps.begin(), Step());
    phase.steps.emplace_back();
  }
  drawn.gloo = round % 2 == 1;
  const auto [first, second] = pair_at(static_cast<int>(seed % kPairs));
  drawn.features = {first, second};
  Adding adding(drawn);
  adding.add(first);
  adding.add(second);
  settle(drawn);
  return drawn;
}

}  // namespace tessera::generated
